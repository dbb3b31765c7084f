//! Any bytes as the log of a writable layer, and as the index of a sealed one.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _content_or_error = aenv_fuzz::read_index(bytes);
});
