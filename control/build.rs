//! Compiles the eBPF programs. They travel inside the binary.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    for name in ["smc_option", "loopback", "intercept", "steer"] {
        compile(name);
    }
}

fn compile(name: &str) {
    let source = format!("bpf/{name}.bpf.c");
    println!("cargo::rerun-if-changed={source}");
    let objects = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    let object = objects.join(name).with_extension("o");
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let status = Command::new("clang")
        .args(["-O2", "-g", "-target", "bpf", "-Wall", "-Werror"])
        // Where Debian keeps <asm/types.h>; elsewhere the directory does not exist.
        .arg(format!("-I/usr/include/{architecture}-linux-gnu"))
        .args(["-c", &source, "-o"])
        .arg(&object)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("clang could not compile {source} ({status}); {HINT}"),
        Err(error) => panic!("clang could not be started ({error}); {HINT}"),
    }
}

const HINT: &str = "scripts/setup installs clang and libbpf-dev, which this crate needs to build";
