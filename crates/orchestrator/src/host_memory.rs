//! What is asked of the host's memory. Values only: whoever starts the node knows how to measure.

/// Measures the memory of the host.
pub trait HostMemory: Send + Sync + 'static {
    /// What there is now. Called every second, so it must not take long.
    ///
    /// # Errors
    /// When the kernel does not tell.
    fn read(&self) -> std::io::Result<MemoryReading>;
}

/// The memory of the host at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryReading {
    /// Bytes that can be had without swapping: on the host, or in the narrowest control group above the VMs.
    pub available_bytes: u64,
    /// Share of the last ten seconds in which everything that could run waited for memory, from 0 to 1; zero where the kernel
    /// does not tell.
    pub stalled: f32,
}

impl MemoryReading {
    /// Nothing is short.
    pub const PLENTY: Self = Self { available_bytes: u64::MAX, stalled: 0.0 };
}
