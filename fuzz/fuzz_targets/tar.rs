//! Any bytes as a stored layer in whatever wrapping.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _content_or_error = aenv_fuzz::read_tar(bytes);
});
