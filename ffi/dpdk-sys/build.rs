//! Compiles the shim into a shared object of its own, which travels inside the library: whoever
//! uses it is not linked against DPDK. Where DPDK's headers are absent, there is no object, and a
//! constant says why.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/dpdk");
    println!("cargo::rerun-if-changed={SOURCE}");
    // scripts/setup writes it, also where it could not fetch the headers.
    println!("cargo::rerun-if-changed={}", fetched.join("state").display());
    let object = out.join("shim.so");
    let source = match compile(&[fetched.join("usr/include"), "/usr/include".into()], &object) {
        Ok(()) => format!(
            "pub(crate) const OBJECT: Result<&[u8], &str> = Ok(include_bytes!({object:?}));\n"
        ),
        Err(why) => {
            println!("cargo::warning=built without DPDK: {why}");
            format!("pub(crate) const OBJECT: Result<&[u8], &str> = Err({why:?});\n")
        }
    };
    fs::write(out.join("object.rs"), source).expect("cargo made the directory");
}

/// Compiles the shim with the first headers that are there.
fn compile(roots: &[PathBuf], object: &Path) -> Result<(), String> {
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    if architecture != "x86_64" {
        return Err(format!("its headers are fetched for x86_64 only, not for {architecture}"));
    }
    let root = roots.iter().find(|root| root.join("dpdk/rte_version.h").exists());
    let root = root.ok_or("there were no headers of DPDK; scripts/setup fetches them")?;
    let exact = root.join("x86_64-linux-gnu/dpdk");
    let abi = abi(&exact.join("rte_build_config.h"))?;
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-g1", "-fvisibility=hidden", "-D_GNU_SOURCE"])
        .args(["-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations"])
        // What Debian builds DPDK for.
        .args(["-march=corei7", "-include", "rte_config.h"])
        .arg("-isystem")
        .arg(root.join("dpdk"))
        .arg("-isystem")
        .arg(exact)
        .args([SOURCE, "-o"])
        .arg(object)
        .arg("-Wl,--no-undefined")
        .args(LIBRARIES.map(|library| format!("-l:librte_{library}.so.{abi}")))
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("the C compiler could not build its shim ({status})")),
        Err(error) => Err(format!("the C compiler could not be started ({error})")),
    }
}

/// The version in the names of the libraries that belong to these headers. It has grown by one each
/// year since 20.11, which had 21.
fn abi(config: &Path) -> Result<u32, String> {
    let text = fs::read_to_string(config)
        .map_err(|error| format!("{} cannot be read ({error})", config.display()))?;
    let year = text.lines().find_map(|line| line.strip_prefix("#define RTE_VER_YEAR "));
    let year = year.and_then(|year| year.trim().parse::<u32>().ok());
    Ok(year.ok_or("its headers name no version")? + 1)
}

const SOURCE: &str = "src/shim.c";
const LIBRARIES: [&str; 4] = ["eal", "ethdev", "mbuf", "mempool"];
