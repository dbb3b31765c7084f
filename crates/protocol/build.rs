//! Compiles the `.proto` files into messages, server traits and clients of the guest daemon's services.
//!
//! The proto files are parsed in Rust, so that a build needs no `protoc` on the machine.

use std::path::PathBuf;

type BoxError = Box<dyn std::error::Error>;

const FILES: [&str; 2] = ["process/process.proto", "filesystem/filesystem.proto"];

fn main() -> Result<(), BoxError> {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let descriptors = out.join("envd.descriptors");
    let set = protox::Compiler::new(["proto"])?
        .include_source_info(true)
        .include_imports(true)
        .open_files(FILES)?
        .encode_file_descriptor_set();
    std::fs::write(&descriptors, set)?;
    connectrpc_build::Config::new()
        .descriptor_set(descriptors)
        .files(&FILES)
        .emit_rerun_directives(false)
        .include_file("envd_services.rs")
        .compile()?;
    Ok(())
}
