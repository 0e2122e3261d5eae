//! Every seed of every fuzz target, and every input that once found something, on any toolchain.

use std::fs;
use std::path::Path;

#[allow(unreachable_pub, reason = "a crate of its own to the fuzzer")]
#[path = "targets/mod.rs"]
mod targets;

fn replay(target: &str, run: fn(&[u8])) {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
    let mut files: Vec<_> = fs::read_dir(&seeds)
        .expect("each target has seeds")
        .map(|entry| entry.expect("a name").path())
        .collect();
    files.sort();
    assert!(files.len() > 4, "too few in {}", seeds.display());
    for file in files {
        // Shown only if the test fails: the last line is the culprit.
        println!("{}", file.display());
        run(&fs::read(&file).expect("a seed can be read"));
    }
}

#[test]
fn clc() {
    replay("clc", targets::clc::run);
}

#[test]
fn llc() {
    replay("llc", targets::llc::run);
}

#[test]
fn cdc() {
    replay("cdc", targets::cdc::run);
}

#[test]
fn roce() {
    replay("roce", targets::roce::run);
}

#[test]
fn pcap() {
    replay("pcap", targets::pcap::run);
}

#[test]
fn config() {
    replay("config", targets::config::run);
}

#[test]
fn door() {
    replay("door", targets::door::run);
}

#[test]
fn rings() {
    replay("rings", targets::rings::run);
}

#[test]
fn shortcut() {
    replay("shortcut", targets::shortcut::run);
}
