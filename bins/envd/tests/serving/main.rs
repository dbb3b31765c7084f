//! The daemon as an ordinary process, driven over plain HTTP as clients do. Runs programs as root, so it needs root;
//! without it these tests do nothing.

mod daemon;
mod files;
mod filesystem;
mod greeting;
mod processes;
