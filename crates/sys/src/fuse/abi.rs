//! The messages between the kernel and a FUSE server, as `linux/fuse.h` lays them out.
//!
//! ```text
//! kernel ▶ server   RequestHeader (40) | arguments of the opcode | data or a name ending in NUL
//! server ▶ kernel   ReplyHeader (16)   | body                      unique as in the request, error 0 or -errno
//! server ▶ kernel   ReplyHeader (16)   | notification              unique 0, error: one of `notify`
//! ```
//! Owns nothing. All fields are in the machine's byte order. Sizes are checked at compile time.

mod codes;

pub use codes::{init_flags, notify, opcode, open_flags, set_attributes};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Major version of the protocol that is spoken here.
pub const KERNEL_VERSION: u32 = 7;
/// Newest minor version whose messages these are.
pub const KERNEL_MINOR_VERSION: u32 = 41;
/// Oldest minor version a kernel may have (Linux 5.4).
pub const OLDEST_MINOR_VERSION: u32 = 31;
/// Number of the root directory's node.
pub const ROOT_NODE: u64 = 1;

/// Begins every request.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct RequestHeader {
    /// Bytes of the whole request.
    pub length: u32,
    /// One of [`opcode`].
    pub opcode: u32,
    /// To be repeated in the answer.
    pub unique: u64,
    /// Number of the file or directory it is about.
    pub node: u64,
    /// Who asks.
    pub user: u32,
    /// With which group.
    pub group: u32,
    /// In which thread, as the namespace of the mount numbers it; 0 when it is not in there.
    pub pid: u32,
    /// Of extensions that follow, in units of 8 bytes.
    pub extensions: u16,
    /// Always 0.
    pub padding: u16,
}

/// Begins every answer and notification.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ReplyHeader {
    /// Bytes of the whole answer.
    pub length: u32,
    /// 0, a negative `errno`, or one of [`notify`] when `unique` is 0.
    pub error: i32,
    /// Of the request.
    pub unique: u64,
}

/// What the kernel offers.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InitIn {
    /// Version of the protocol.
    pub major: u32,
    /// Version of the protocol.
    pub minor: u32,
    /// Most bytes it reads ahead.
    pub max_readahead: u32,
    /// See [`init_flags`].
    pub flags: u32,
    /// See [`init_flags`].
    pub flags2: u32,
    /// Always 0.
    pub unused: [u32; 11],
}

/// What the server agrees to.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InitOut {
    /// Version of the protocol.
    pub major: u32,
    /// Version of the protocol.
    pub minor: u32,
    /// Most bytes that are read ahead.
    pub max_readahead: u32,
    /// See [`init_flags`].
    pub flags: u32,
    /// Most requests that nobody waits for.
    pub max_background: u16,
    /// From how many on the kernel slows down.
    pub congestion_threshold: u16,
    /// Most bytes of one write.
    pub max_write: u32,
    /// Granularity of times in nanoseconds.
    pub time_granularity: u32,
    /// Most pages of one request.
    pub max_pages: u16,
    /// Not used.
    pub map_alignment: u16,
    /// See [`init_flags`].
    pub flags2: u32,
    /// Not used.
    pub max_stack_depth: u32,
    /// Always 0.
    pub unused: [u32; 6],
}

/// Attributes of a file or directory.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Attributes {
    /// Number that `stat` shows.
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes that are stored.
    pub blocks: u64,
    /// Seconds since 1970 of the last read.
    pub atime: u64,
    /// Seconds since 1970 of the last write.
    pub mtime: u64,
    /// Seconds since 1970 of the last change of attributes.
    pub ctime: u64,
    /// Nanoseconds to `atime`.
    pub atime_nanoseconds: u32,
    /// Nanoseconds to `mtime`.
    pub mtime_nanoseconds: u32,
    /// Nanoseconds to `ctime`.
    pub ctime_nanoseconds: u32,
    /// Type and permissions.
    pub mode: u32,
    /// Number of names.
    pub links: u32,
    /// Owner.
    pub user: u32,
    /// Group.
    pub group: u32,
    /// Number of a device.
    pub device: u32,
    /// Bytes that are best read at once.
    pub block_size: u32,
    /// Not used.
    pub flags: u32,
}

/// An entry of a directory.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct EntryOut {
    /// Number that requests about it carry.
    pub node: u64,
    /// Together with `node` unique for all time.
    pub generation: u64,
    /// Seconds for which the name stays.
    pub entry_valid: u64,
    /// Seconds for which the attributes stay.
    pub attributes_valid: u64,
    /// Nanoseconds to it.
    pub entry_valid_nanoseconds: u32,
    /// Nanoseconds to it.
    pub attributes_valid_nanoseconds: u32,
    /// The attributes.
    pub attributes: Attributes,
}

/// Attributes and how long they stay.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct AttributesOut {
    /// Seconds.
    pub valid: u64,
    /// Nanoseconds to it.
    pub valid_nanoseconds: u32,
    /// Always 0.
    pub unused: u32,
    /// The attributes.
    pub attributes: Attributes,
}

/// Arguments of [`opcode::FORGET`].
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ForgetIn {
    /// How many look-ups are forgotten.
    pub lookups: u64,
}

/// Arguments of [`opcode::BATCH_FORGET`], followed by as many [`ForgetOne`].
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct BatchForgetIn {
    /// How many follow.
    pub count: u32,
    /// Always 0.
    pub unused: u32,
}

/// One of [`BatchForgetIn`].
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ForgetOne {
    /// Of which node.
    pub node: u64,
    /// How many look-ups are forgotten.
    pub lookups: u64,
}

/// Arguments of [`opcode::SETATTR`].
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SetAttributesIn {
    /// See [`set_attributes`].
    pub valid: u32,
    /// Always 0.
    pub padding: u32,
    /// Of the open file.
    pub handle: u64,
    /// New size.
    pub size: u64,
    /// Not used.
    pub lock_owner: u64,
    /// Seconds of the new times.
    pub times: [u64; 3],
    /// Nanoseconds to them.
    pub nanoseconds: [u32; 3],
    /// New permissions.
    pub mode: u32,
    /// Not used.
    pub unused4: u32,
    /// New owner.
    pub user: u32,
    /// New group.
    pub group: u32,
    /// Not used.
    pub unused5: u32,
}

/// Arguments of [`opcode::OPEN`].
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct OpenIn {
    /// As of `open(2)`.
    pub flags: u32,
    /// Not used.
    pub open_flags: u32,
}

/// Answer to [`opcode::OPEN`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct OpenOut {
    /// To be repeated in requests about the open file.
    pub handle: u64,
    /// See [`open_flags`].
    pub open_flags: u32,
    /// Not used.
    pub backing: u32,
}

/// Arguments of [`opcode::READ`], [`opcode::READDIR`] and [`opcode::READDIRPLUS`].
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ReadIn {
    /// Of the open file.
    pub handle: u64,
    /// First byte, or where to go on in a directory.
    pub offset: u64,
    /// Most bytes.
    pub size: u32,
    /// Not used.
    pub read_flags: u32,
    /// Not used.
    pub lock_owner: u64,
    /// As of `open(2)`.
    pub flags: u32,
    /// Always 0.
    pub padding: u32,
}

/// Arguments of [`opcode::WRITE`], followed by the data.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct WriteIn {
    /// Of the open file.
    pub handle: u64,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub size: u32,
    /// Not used.
    pub write_flags: u32,
    /// Not used.
    pub lock_owner: u64,
    /// As of `open(2)`.
    pub flags: u32,
    /// Always 0.
    pub padding: u32,
}

/// Answer to [`opcode::WRITE`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct WriteOut {
    /// Bytes that were written.
    pub size: u32,
    /// Always 0.
    pub padding: u32,
}

/// Answer to [`opcode::STATFS`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct StatfsOut {
    /// In all, in units of `fragment_size`.
    pub blocks: u64,
    /// Free ones.
    pub blocks_free: u64,
    /// Free ones for others than root.
    pub blocks_available: u64,
    /// Files in all.
    pub files: u64,
    /// Files that can still be made.
    pub files_free: u64,
    /// Bytes that are best read at once.
    pub block_size: u32,
    /// Longest name.
    pub name_length: u32,
    /// Unit of the counts.
    pub fragment_size: u32,
    /// Always 0.
    pub padding: u32,
    /// Always 0.
    pub spare: [u32; 6],
}

/// Arguments of [`opcode::FALLOCATE`].
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct FallocateIn {
    /// Of the open file.
    pub handle: u64,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
    /// As of `fallocate(2)`.
    pub mode: u32,
    /// Always 0.
    pub padding: u32,
}

/// Arguments of [`opcode::LSEEK`].
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct LseekIn {
    /// Of the open file.
    pub handle: u64,
    /// Where to begin.
    pub offset: u64,
    /// As of `lseek(2)`.
    pub whence: u32,
    /// Always 0.
    pub padding: u32,
}

/// Answer to [`opcode::LSEEK`].
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct LseekOut {
    /// What was found.
    pub offset: u64,
}

/// Begins an entry of a listing; its name follows, filled up to a multiple of 8 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct DirectoryEntry {
    /// Number that `readdir` shows.
    pub inode: u64,
    /// Where to go on behind it.
    pub offset: u64,
    /// Bytes of the name.
    pub name_length: u32,
    /// Type: the file type of `mode` divided by 4096.
    pub kind: u32,
}

/// Body of [`notify::INVALIDATE_ENTRY`], followed by the name and a NUL.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct NotifyEntry {
    /// The directory.
    pub parent: u64,
    /// Bytes of the name.
    pub name_length: u32,
    /// Always 0.
    pub flags: u32,
}

/// Body of [`notify::DELETE`], followed by the name and a NUL.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct NotifyDelete {
    /// The directory.
    pub parent: u64,
    /// The file.
    pub child: u64,
    /// Bytes of the name.
    pub name_length: u32,
    /// Always 0.
    pub padding: u32,
}

const _: () = {
    assert!(size_of::<RequestHeader>() == 40);
    assert!(size_of::<ReplyHeader>() == 16);
    assert!(size_of::<InitIn>() == 64);
    assert!(size_of::<InitOut>() == 64);
    assert!(size_of::<Attributes>() == 88);
    assert!(size_of::<EntryOut>() == 128);
    assert!(size_of::<AttributesOut>() == 104);
    assert!(size_of::<SetAttributesIn>() == 88);
    assert!(size_of::<OpenOut>() == 16);
    assert!(size_of::<ReadIn>() == 40);
    assert!(size_of::<WriteIn>() == 40);
    assert!(size_of::<StatfsOut>() == 80);
    assert!(size_of::<FallocateIn>() == 32);
    assert!(size_of::<LseekIn>() == 24);
    assert!(size_of::<DirectoryEntry>() == 24);
    assert!(size_of::<NotifyEntry>() == 16);
    assert!(size_of::<NotifyDelete>() == 24);
};

#[cfg(test)]
mod tests;
