//! Compiles the eBPF program that puts the SMC option on SYNs. It travels inside the binary.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    let object = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it")).join("smc_option.o");
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let status = Command::new("clang")
        .args(["-O2", "-g", "-target", "bpf", "-Wall", "-Werror"])
        // Where Debian keeps <asm/types.h>; elsewhere the directory does not exist.
        .arg(format!("-I/usr/include/{architecture}-linux-gnu"))
        .args(["-c", SOURCE, "-o"])
        .arg(&object)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("clang could not compile {SOURCE} ({status}); {HINT}"),
        Err(error) => panic!("clang could not be started ({error}); {HINT}"),
    }
}

const SOURCE: &str = "bpf/smc_option.bpf.c";
const HINT: &str = "scripts/setup installs clang and libbpf-dev, which this crate needs to build";
