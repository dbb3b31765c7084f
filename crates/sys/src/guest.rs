//! What the first process of a guest needs from the kernel beyond safe libraries: feeding the random number
//! generator, growing the root filesystem, and starting programs as another user.
//!
//! Owns no state. Never waits for the programs it starts: who calls reaps them.

mod filesystem;
mod random;
mod spawn;

pub use filesystem::grow_ext4;
pub use random::{RandomPoolError, feed_random_pool};
pub use spawn::{Program, SpawnError, Spawned, StandardInput, spawn};
