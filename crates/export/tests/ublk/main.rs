//! The ublk exporter with the kernel's real driver. Needs root, Linux 6.9 and `ublk_drv`, as in the nested machine; elsewhere
//! each test prints a line and does nothing, unless AENV_MUST_TEST says that it must.
//!
//! Processes under test are this program again, running only [`role`].

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "children talk that way, and times are shown")]

mod backing;
mod death;
mod faults;
mod lifecycle;
mod requests;
mod roles;
mod stage;
mod times;

/// Not a test: what a child does.
#[test]
#[ignore = "the part of a child, run by the other tests"]
fn role() {
    if let Ok(role) = std::env::var(roles::ROLE) {
        roles::play(&role);
    }
}
