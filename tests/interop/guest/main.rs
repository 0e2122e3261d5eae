//! `smcgate-guest`: everything the rig does inside a Linux guest whose kernel speaks SMC-R.
//!
//! It is the agent that runs programs in the guest, the client of this agent, the applications at
//! both ends of a connection, and the operator's tool. The tool shows UEIDs, PNET table, sockets
//! and links, as `smcr`, `smc_pnet` and `smcss` do, which Debian 12 does not have.

mod agent;
mod diag;
mod netlink;
mod operator;
mod part;
mod protocol;
mod stream;

use std::io;
use std::net::SocketAddrV4;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use part::Part;
use stream::Transport;

/// A Linux guest that speaks SMC-R, from inside and from outside.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// In the guest: listen on this address and run what callers ask for, until the guest ends
    Agent { at: SocketAddrV4 },
    /// Outside: run a command in guest N as if it ran here; it is killed when this is killed
    On {
        /// Seconds to wait for the guest to boot
        #[arg(long, default_value_t = 10)]
        patience: u64,
        /// 1 or 2
        guest: u8,
        #[arg(trailing_var_arg = true, required = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Add a user-defined EID
    UeidAdd { eid: String },
    /// Remove all user-defined EIDs
    UeidFlush,
    /// List the EIDs that this kernel offers
    Ueids,
    /// Put a network device and an RDMA device into the PNET table
    PnetAdd { pnet: String, ethernet: String, rdma: String },
    /// Empty the PNET table
    PnetFlush,
    /// List connections of AF_SMC sockets: addresses, SMCR or TCP, and why TCP
    Sockets,
    /// List SMC-R link groups and their links
    Links,
    /// Count connections by how they were set up, and fallbacks by reason
    Counts,
    /// Act as client: connect and play a part, for example `send=1000 shut drain mode`
    Connect {
        #[command(flatten)]
        options: Options,
        to: SocketAddrV4,
        #[arg(required = true)]
        part: Vec<Part>,
    },
    /// Act as server: accept and play a part with each connection
    Accept {
        #[command(flatten)]
        options: Options,
        at: SocketAddrV4,
        #[arg(required = true)]
        part: Vec<Part>,
    },
}

/// How many connections, and over what.
#[derive(clap::Args)]
struct Options {
    /// Use an ordinary TCP socket instead of an AF_SMC socket
    #[arg(long)]
    tcp: bool,
    /// Connections, all at once
    #[arg(long, default_value_t = 1)]
    times: u32,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("smcgate-guest: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> io::Result<ExitCode> {
    match command {
        Command::Agent { at } => agent::serve(at)?,
        Command::On { patience, guest, command } => {
            return protocol::run_on(guest, &command, Duration::from_secs(patience));
        }
        Command::UeidAdd { eid } => operator::add_ueid(&eid)?,
        Command::UeidFlush => operator::flush_ueids()?,
        Command::Ueids => print(operator::ueids()?),
        Command::PnetAdd { pnet, ethernet, rdma } => operator::add_pnet(&pnet, &ethernet, &rdma)?,
        Command::PnetFlush => operator::flush_pnet()?,
        Command::Sockets => print(diag::sockets()?),
        Command::Links => print(operator::links()?),
        Command::Counts => print(operator::counts()?),
        Command::Connect { options, to, part } => {
            part::connect(Transport::of(options.tcp), to, &part, options.times);
        }
        Command::Accept { options, at, part } => {
            part::accept(Transport::of(options.tcp), at, &part, options.times)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn print(lines: impl IntoIterator<Item = impl std::fmt::Display>) {
    lines.into_iter().for_each(|line| println!("{line}"));
}
