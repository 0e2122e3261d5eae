//! The target `shortcut` for libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| smcgate_fuzz::shortcut::run(data));
