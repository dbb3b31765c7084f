//! What travels between the driver and its server, as bytes. Owns nothing; no input makes it panic.
//!
//! ```text
//!  ctrl command  dev u32 │ queue u16 │ len u16 │ addr u64 │ data u64 │ path len u16, pad u16, reserved u32        32 bytes
//!  device info   queues u16 │ depth u16 │ state u16 │ pad │ max io u32 │ dev u32 │ pid i32 │ pad │ features u64
//!                │ server's own u64 │ uid u32 │ gid u32 │ reserved 2 × u64                                         64 bytes
//!  parameters    len u32 │ types u32 │ basic 32 bytes │ discard 20 bytes                                           60 bytes
//!  io command    queue u16 │ tag u16 │ result i32 │ addr u64                                                       16 bytes
//!  io descriptor operation and flags u32 │ sectors u32 │ start sector u64 │ addr u64                               24 bytes
//! ```

/// Largest number of a device.
pub const MAX_NUMBER: u32 = (1 << 20) - 1;
/// Bytes of one request's descriptor.
pub const DESCRIPTOR_BYTES: usize = 24;
/// Bytes of one sector.
const SECTOR_BYTES: u64 = 512;
/// Stands for "no queue" in commands to the whole device.
pub(super) const NO_QUEUE: u16 = u16::MAX;
/// The driver's limit, by which it spaces the mappings of queues.
pub(super) const MAX_DEPTH: u16 = 4096;
pub(super) const INFO_BYTES: usize = 64;
const PARAMETERS_BYTES: usize = 60;
/// Room for parameters of newer kernels, which we do not read.
pub(super) const PARAMETERS_ROOM: usize = 256;

/// `_IOC`: direction, size, the driver's letter, number.
const fn encoded(direction: u32, size: u32, number: u32) -> u32 {
    direction << 30 | size << 16 | (b'u' as u32) << 8 | number
}
const READ: u32 = 2;
const READ_WRITE: u32 = 3;
const CTRL_BYTES: u32 = 32;
const IO_BYTES: u32 = 16;

pub(super) const ADD_DEVICE: u32 = encoded(READ_WRITE, CTRL_BYTES, 0x04);
pub(super) const START_DEVICE: u32 = encoded(READ_WRITE, CTRL_BYTES, 0x06);
pub(super) const STOP_DEVICE: u32 = encoded(READ_WRITE, CTRL_BYTES, 0x07);
pub(super) const SET_PARAMETERS: u32 = encoded(READ_WRITE, CTRL_BYTES, 0x08);
pub(super) const GET_PARAMETERS: u32 = encoded(READ, CTRL_BYTES, 0x09);
pub(super) const BEGIN_RECOVERY: u32 = encoded(READ_WRITE, CTRL_BYTES, 0x10);
pub(super) const END_RECOVERY: u32 = encoded(READ_WRITE, CTRL_BYTES, 0x11);
pub(super) const GET_INFO: u32 = encoded(READ, CTRL_BYTES, 0x02);
pub(super) const GET_FEATURES: u32 = encoded(READ, CTRL_BYTES, 0x13);
pub(super) const DELETE_LATER: u32 = encoded(READ, CTRL_BYTES, 0x14);
pub(super) const FETCH: u32 = encoded(READ_WRITE, IO_BYTES, 0x20);
pub(super) const COMMIT_AND_FETCH: u32 = encoded(READ_WRITE, IO_BYTES, 0x21);

/// What the driver or a device can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(pub u64);

impl Features {
    /// Requests wait when the server dies, and another may take over.
    pub const USER_RECOVERY: Self = Self(1 << 3);
    /// Then also requests that the dead server had taken are given out again.
    pub const USER_RECOVERY_REISSUE: Self = Self(1 << 4);
    /// Commands are numbered like ioctls.
    pub const IOCTL_ENCODING: Self = Self(1 << 6);
    /// Data is read and written at the char device.
    pub const USER_COPY: Self = Self(1 << 7);

    /// All of both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `wanted` are there.
    #[must_use]
    pub const fn contains(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }
}

/// What a device is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceState {
    /// Not started, or stopped.
    Dead,
    /// A server answers.
    Live,
    /// Its server is gone; requests wait.
    Quiesced,
    /// A state of a newer kernel.
    Other(u16),
}

/// What the driver knows of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number N of ublkbN and ublkcN.
    pub number: u32,
    /// Hardware queues; the driver lowers it to the number of processors.
    pub queues: u16,
    /// Requests that may be under way in each.
    pub depth: u16,
    /// Only told by the driver.
    pub state: DeviceState,
    /// Bytes of the largest request.
    pub max_io_bytes: u32,
    /// Its server, or -1; only told by the driver.
    pub server: i32,
    /// What it does.
    pub features: Features,
    /// Kept for the server and not looked at by the driver.
    pub mark: u64,
}

impl DeviceInfo {
    pub(super) fn encode(&self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        put(&mut bytes, 0, &self.queues.to_le_bytes());
        put(&mut bytes, 2, &self.depth.to_le_bytes());
        put(&mut bytes, 8, &self.max_io_bytes.to_le_bytes());
        put(&mut bytes, 12, &self.number.to_le_bytes());
        put(&mut bytes, 24, &self.features.0.to_le_bytes());
        put(&mut bytes, 32, &self.mark.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; INFO_BYTES]) -> Self {
        let state = match u16::from_le_bytes(take(bytes, 4)) {
            0 => DeviceState::Dead,
            1 => DeviceState::Live,
            2 => DeviceState::Quiesced,
            other => DeviceState::Other(other),
        };
        Self {
            number: u32::from_le_bytes(take(bytes, 12)),
            queues: u16::from_le_bytes(take(bytes, 0)),
            depth: u16::from_le_bytes(take(bytes, 2)),
            state,
            max_io_bytes: u32::from_le_bytes(take(bytes, 8)),
            server: i32::from_le_bytes(take(bytes, 16)),
            features: Features(u64::from_le_bytes(take(bytes, 24))),
            mark: u64::from_le_bytes(take(bytes, 32)),
        }
    }
}

/// Shape of a device, fixed before it is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameters {
    /// Size in bytes, a multiple of 512.
    pub bytes: u64,
    /// Nothing may be written; then there are no flushes and discards either.
    pub read_only: bool,
    /// Smallest unit of reads and writes, as a power of two: 9 for 512 bytes.
    pub logical_shift: u8,
    /// Unit that is written without reading first, as a power of two.
    pub physical_shift: u8,
    /// Bytes of the largest request.
    pub max_io_bytes: u32,
    /// Bytes of the largest discard; 0 for none.
    pub max_discard_bytes: u64,
    /// Bytes of the largest writing of zeros; 0 for none.
    pub max_zeroes_bytes: u64,
}

const ATTRIBUTE_READ_ONLY: u32 = 1;
const ATTRIBUTE_VOLATILE_CACHE: u32 = 1 << 2;
const ATTRIBUTE_FUA: u32 = 1 << 3;
const TYPE_BASIC: u32 = 1;
const TYPE_DISCARD: u32 = 1 << 1;

impl Parameters {
    pub(super) fn encode(&self) -> [u8; PARAMETERS_BYTES] {
        let sectors = |bytes: u64| u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
        let (types, attributes) = match self.read_only {
            true => (TYPE_BASIC, ATTRIBUTE_READ_ONLY),
            false => (TYPE_BASIC | TYPE_DISCARD, ATTRIBUTE_VOLATILE_CACHE | ATTRIBUTE_FUA),
        };
        let mut bytes = [0; PARAMETERS_BYTES];
        put(&mut bytes, 0, &60_u32.to_le_bytes());
        put(&mut bytes, 4, &types.to_le_bytes());
        put(&mut bytes, 8, &attributes.to_le_bytes());
        // Optimal and smallest good size of requests are the physical block too.
        let shifts = [self.logical_shift, self.physical_shift, self.physical_shift, self.physical_shift];
        put(&mut bytes, 12, &shifts);
        put(&mut bytes, 16, &sectors(self.max_io_bytes.into()).to_le_bytes());
        put(&mut bytes, 24, &(self.bytes / SECTOR_BYTES).to_le_bytes());
        if !self.read_only {
            let granularity = 1_u32.checked_shl(self.physical_shift.into()).unwrap_or(0);
            put(&mut bytes, 44, &granularity.to_le_bytes());
            put(&mut bytes, 48, &sectors(self.max_discard_bytes).to_le_bytes());
            put(&mut bytes, 52, &sectors(self.max_zeroes_bytes).to_le_bytes());
            put(&mut bytes, 56, &1_u16.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; PARAMETERS_ROOM]) -> Self {
        let number = |at| u32::from_le_bytes(take(bytes, at));
        let in_bytes = |sectors: u32| u64::from(sectors) * SECTOR_BYTES;
        let discard = |at| if number(4) & TYPE_DISCARD == 0 { 0 } else { in_bytes(number(at)) };
        Self {
            bytes: u64::from_le_bytes(take(bytes, 24)).saturating_mul(SECTOR_BYTES),
            read_only: number(8) & ATTRIBUTE_READ_ONLY != 0,
            logical_shift: bytes[12],
            physical_shift: bytes[13],
            max_io_bytes: u32::try_from(in_bytes(number(16))).unwrap_or(u32::MAX),
            max_discard_bytes: discard(48),
            max_zeroes_bytes: discard(52),
        }
    }
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Data to the kernel.
    Read,
    /// Data from the kernel.
    Write,
    /// Everything written before becomes durable.
    Flush,
    /// The range's content is no longer needed.
    Discard,
    /// The range reads as zeros.
    WriteZeroes,
    /// Not known here.
    Other(u8),
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestDescriptor {
    /// What.
    pub operation: Operation,
    /// Durable before it is answered.
    pub forced_unit_access: bool,
    /// First byte of the device.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

const FLAG_FUA: u32 = 1 << 13;

impl RequestDescriptor {
    pub(super) fn decode(bytes: &[u8; DESCRIPTOR_BYTES]) -> Self {
        let what = u32::from_le_bytes(take(bytes, 0));
        let operation = match what.to_le_bytes()[0] {
            0 => Operation::Read,
            1 => Operation::Write,
            2 => Operation::Flush,
            3 => Operation::Discard,
            5 => Operation::WriteZeroes,
            other => Operation::Other(other),
        };
        Self {
            operation,
            forced_unit_access: what & FLAG_FUA != 0,
            // A device has less than 2^64 bytes, so what saturates lies outside of every device.
            offset: u64::from_le_bytes(take(bytes, 8)).saturating_mul(SECTOR_BYTES),
            length: u64::from(u32::from_le_bytes(take(bytes, 4))) * SECTOR_BYTES,
        }
    }
}

/// A control command; `address` is of a buffer with `length` bytes.
pub(super) fn control_command(number: u32, address: u64, length: u16, data: u64) -> [u8; 80] {
    let mut bytes = [0; 80];
    put(&mut bytes, 0, &number.to_le_bytes());
    put(&mut bytes, 4, &NO_QUEUE.to_le_bytes());
    put(&mut bytes, 6, &length.to_le_bytes());
    put(&mut bytes, 8, &address.to_le_bytes());
    put(&mut bytes, 16, &data.to_le_bytes());
    bytes
}

/// A command of a queue, without a buffer.
pub(super) fn io_command(queue: u16, tag: u16, result: i32) -> [u8; 16] {
    let mut bytes = [0; 16];
    put(&mut bytes, 0, &queue.to_le_bytes());
    put(&mut bytes, 2, &tag.to_le_bytes());
    put(&mut bytes, 4, &result.to_le_bytes());
    bytes
}

/// Where the char device has the data of a request.
pub(super) fn data_position(queue: u16, tag: u16, offset: u32) -> u64 {
    const BASE: u64 = 0x8000_0000;
    BASE + (u64::from(queue) << 41 | u64::from(tag) << 25 | u64::from(offset))
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[at..at + N]);
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_kernels_header() {
        // As a C compiler computes them from the header's _IOWR and _IOR.
        assert_eq!(ADD_DEVICE, 0xc020_7504);
        assert_eq!(GET_FEATURES, 0x8020_7513);
        assert_eq!(FETCH, 0xc010_7520);
        assert_eq!(COMMIT_AND_FETCH, 0xc010_7521);
    }

    #[test]
    fn device_info_survives_its_encoding() {
        let info = DeviceInfo {
            number: 0x0102_0304,
            queues: 2,
            depth: 64,
            state: DeviceState::Dead,
            max_io_bytes: 1 << 20,
            server: 0,
            features: Features::USER_COPY.and(Features::USER_RECOVERY),
            mark: 0x1122_3344_5566_7788,
        };
        assert_eq!(DeviceInfo::decode(&info.encode()), info);
        assert!(info.features.contains(Features::USER_COPY));
        assert!(!info.features.contains(Features::USER_COPY.and(Features::USER_RECOVERY_REISSUE)));
    }

    #[test]
    fn parameters_survive_their_encoding() {
        let disk = Parameters {
            bytes: 1 << 40,
            read_only: false,
            logical_shift: 9,
            physical_shift: 12,
            max_io_bytes: 1 << 20,
            max_discard_bytes: 1 << 30,
            max_zeroes_bytes: 1 << 26,
        };
        let image = Parameters { read_only: true, max_discard_bytes: 0, max_zeroes_bytes: 0, ..disk };
        for parameters in [disk, image] {
            let mut room = [0; PARAMETERS_ROOM];
            room[..PARAMETERS_BYTES].copy_from_slice(&parameters.encode());
            assert_eq!(Parameters::decode(&room), parameters);
        }
    }

    #[test]
    fn any_descriptor_is_read() {
        let mut bytes = [0xff; DESCRIPTOR_BYTES];
        let descriptor = RequestDescriptor::decode(&bytes);
        assert_eq!((descriptor.operation, descriptor.offset), (Operation::Other(0xff), u64::MAX));
        bytes[..4].copy_from_slice(&(1 | FLAG_FUA).to_le_bytes());
        bytes[4..8].copy_from_slice(&8_u32.to_le_bytes());
        bytes[8..16].copy_from_slice(&3_u64.to_le_bytes());
        let wanted = RequestDescriptor {
            operation: Operation::Write,
            forced_unit_access: true,
            offset: 1536,
            length: 4096,
        };
        assert_eq!(RequestDescriptor::decode(&bytes), wanted);
    }

    #[test]
    fn the_data_of_two_requests_never_overlaps() {
        assert_eq!(data_position(0, 0, 0), 0x8000_0000);
        assert!(data_position(0, 0, (1 << 25) - 1) < data_position(0, 1, 0));
        assert!(data_position(0, u16::MAX, (1 << 25) - 1) < data_position(1, 0, 0));
    }
}
