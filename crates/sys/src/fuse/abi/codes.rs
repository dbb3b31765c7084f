//! Numbers and flags of the FUSE protocol. Owns nothing.

/// What the kernel asks for.
pub mod opcode {
    #![expect(missing_docs, reason = "the names of the protocol, one per system call")]
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const SYMLINK: u32 = 6;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
}

/// What a server may tell without being asked.
pub mod notify {
    /// Forget a directory's entry.
    pub const INVALIDATE_ENTRY: i32 = 3;
    /// A file was removed: forget its entry, though it is in use.
    pub const DELETE: i32 = 6;
}

/// Abilities that are agreed upon at the start: bits 0 to 31 travel as `flags`, the others as `flags2`.
pub mod init_flags {
    /// Reads of one file at the same time.
    pub const ASYNC_READ: u64 = 1 << 0;
    /// Writes of more than a page.
    pub const BIG_WRITES: u64 = 1 << 5;
    /// A listing tells the attributes, too.
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    /// ... when the kernel thinks that they will be wanted.
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    /// Direct I/O of one call at the same time.
    pub const ASYNC_DIO: u64 = 1 << 15;
    /// Look-ups in one directory at the same time.
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    /// Requests of up to `max_pages`.
    pub const MAX_PAGES: u64 = 1 << 22;
    /// The kernel drops cached data only when told.
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    /// `flags2` is valid.
    pub const INIT_EXT: u64 = 1 << 30;
    /// Files with direct I/O can be mapped shared.
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
}

/// How an open file behaves.
pub mod open_flags {
    /// The kernel caches nothing of it.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// What is cached of it stays valid.
    pub const KEEP_CACHE: u32 = 1 << 1;
    /// To close it needs no answer.
    pub const NO_FLUSH: u32 = 1 << 5;
    /// Writes of it may run at the same time.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Which attributes a [`SetAttributesIn`] changes.
pub mod set_attributes {
    /// The permissions.
    pub const MODE: u32 = 1 << 0;
    /// The owner.
    pub const USER: u32 = 1 << 1;
    /// The group.
    pub const GROUP: u32 = 1 << 2;
    /// The size.
    pub const SIZE: u32 = 1 << 3;
    /// One of the times, given or now.
    pub const TIMES: u32 = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 10;
}
