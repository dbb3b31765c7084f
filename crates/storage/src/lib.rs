//! Disks and memory images, for now as raw files whose unchanged blocks are shared by reflink.
//!
//! Owns the files it is told to make; knows nothing of sandboxes, templates or VMMs. Layers take the place of raw files
//! behind the same handles later.
