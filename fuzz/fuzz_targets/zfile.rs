//! Any bytes as a compressed file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _content_or_error = aenv_fuzz::read_zfile(bytes);
});
