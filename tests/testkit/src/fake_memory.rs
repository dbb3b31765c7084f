//! The memory of a fake host: plenty, until a test says otherwise.

use crate::fake_host::FakeHost;
use aenv_orchestrator::{HostMemory, MemoryReading};

impl HostMemory for FakeHost {
    fn read(&self) -> std::io::Result<MemoryReading> {
        Ok(self.memory_reading())
    }
}
