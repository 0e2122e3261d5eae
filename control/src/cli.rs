//! The command line: what can be asked, and the help that says so.
//!
//! Exit codes are stable: 0 it worked; 1 it failed; 2 the command line or the configuration is
//! wrong. Errors are one line on standard error.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use smcgate_door::{Networks, NoChoice, Ports};

use crate::stats::{PER_PAGE_MAX, Transport};

/// The command line, parsed.
#[derive(Debug, Parser)]
#[command(
    name = "smcgate",
    version,
    about = "Carries TCP connections over SMC-R (RFC 7609): RDMA where both ends can, else TCP",
    long_about = "Carries TCP connections over SMC-R (RFC 7609).\n\n\
        Applications speak plain TCP to smcgate. Where the far end offers SMC-R, be it another \
        smcgate or an operating system's own, their bytes travel by RDMA; everywhere else they \
        stay on the same TCP connection. No RDMA hardware is needed: an RNIC in software is built \
        in.",
    after_help = "Start here:\n  \
        smcgate check -c FILE     what would this configuration do?\n  \
        smcgate doctor            can this host do it?\n  \
        smcgate run -c FILE       do it\n  \
        smcgate stats             is it doing it, and if not, why?\n\n\
        Exit codes: 0 it worked, 1 it failed, 2 wrong command line or configuration.",
    propagate_version = true
)]
pub struct Cli {
    /// How much to log on standard error: error, warn, info, debug or trace, or a filter such as
    /// `info,smcgate::admin=debug`
    #[arg(long, global = true, value_name = "LEVEL", value_parser = crate::log::parse_filter)]
    pub log: Option<String>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// One of the things smcgate does.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the gateway until SIGTERM or SIGINT, then finish what is open within drain_timeout
    Run(ConfigFile),
    /// Read a configuration and say what a gateway would do with it, without starting one
    #[command(after_help = "A WARNING is an obstacle that may be gone when the gateway starts, \
        such as a device that\nis not there yet. It is no fault: exit code 0, or 1 with --strict. \
        A file that is wrong\nis one, with exit code 2.")]
    Check(Check),
    /// Find out whether this host can do SMC-R, and what to change if not
    Doctor(Doctor),
    /// Show what a running gateway counts: connections, why some stayed TCP, link groups, RNICs
    Stats(Ask),
    /// List the link groups of a running gateway, each with its peer, our role and its type
    Groups(Ask),
    /// List the links of all groups, each with its RNIC, its state and its connections
    Links(Ask),
    /// List the RNICs of a running gateway
    Rnics(Ask),
    /// Have a running gateway read its configuration again; no connection ends
    ///
    /// Listeners, limits, peers, EIDs and the level of the log change at once. What needs a restart
    /// is said. A configuration that is wrong leaves everything as it was. SIGHUP does the same.
    Reload(Reload),
    /// Take no new connections, at one listener or at all; open ones go on
    Drain(Drain),
    /// Take connections again
    Undrain(Undrain),
    /// Lead connections of applications that know nothing of a gateway to its listeners, or no more
    #[command(subcommand)]
    Intercept(InterceptCommand),
    /// Delete a link of a running gateway, or ask for another one
    #[command(subcommand)]
    Link(LinkCommand),
    /// Take an RNIC of a running gateway out of use, or bring it back
    #[command(subcommand)]
    Rnic(RnicCommand),
    /// Watch a running gateway live: connections, links, pollers, RNICs, and why some stayed TCP
    #[command(after_help = "Keys: q ends it, 1 to 7 and Tab choose what is shown, / filters \
        connections, s sorts\nthem by throughput, bytes or age. It needs a terminal; smcgate \
        stats prints once.")]
    Top(Top),
    /// List the connections of a running gateway, each with its transport and, if that is TCP, why
    Conns(Conns),
    /// Capture what goes over the RNICs of a running gateway, whatever their kind, as pcapng
    #[command(after_help = "For example:\n  \
        smcgate capture -w /tmp/rdma.pcapng --peer 10.8.0.2 --count 1000\n  \
        smcgate capture -w - | tshark -r - -Y smc\n  \
        smcgate decode /tmp/rdma.pcapng\n\n\
        It ends after FRAMES, or with Ctrl-C. Only root and the gateway's own user may ask.\n\
        RoCE in software shows its packets. RNICs (verbs) and shared memory (shm) show work\n\
        requests and received messages, as the packets that they would be; what the peer writes\n\
        is missing there, but is in a capture at the peer. Where frames come faster than FILE\n\
        takes them, some are dropped and counted: connections never wait.")]
    Capture(Capture),
    /// Print the SMC-R messages of a capture, one per line: TCP option, CLC, LLC, CDC, RDMA writes
    #[command(after_help = "Capture both TCP and RoCE, for example:\n  \
        tcpdump -i va -w /tmp/smc.pcap 'tcp port 7002 or udp port 4791'\n  \
        smcgate decode --messages /tmp/smc.pcap\n\n\
        Flags of CDC: B writer blocked, P urgent pending, U urgent present, R update requested,\n\
        F failover validation, D sending done, C connection closed, A abnormal close.")]
    Decode(Decode),
    /// Measure this machine with gateways, with pairs of other proxies and without, side by side
    #[command(after_help = "For example, as root:\n  \
        smcgate bench run --scenarios RR-1,STR --rounds 6\n  \
        smcgate bench load rr --target 10.8.0.2:7010 --connections 32\n\n\
        This is the program smcgate-perf, which is built beside this one and in no package. All\n\
        arguments are its own: smcgate bench --help lists them.")]
    #[command(disable_help_flag = true)]
    Bench(Bench),
    /// Run a program whose TCP connections become SMC-R without a hop, as far as the far end can
    #[command(after_help = "For example:\n  \
        smcgate exec -- nginx -g 'daemon off;'\n  \
        smcgate exec --ports 5432 -- pgbench -h 10.8.0.2\n\n\
        The gateway of this host must run, with [local] socket in its configuration; without it,\n\
        and to far ends without SMC-R, all connections are plain TCP. Programs that are linked\n\
        statically, or do not use the C library (Go), stay TCP, too. Exit codes: 2 if the library\n\
        is not there, 126 and 127 if PROGRAM cannot be run or is not there, else that of PROGRAM.")]
    Exec(Exec),
    /// Print a JSON schema of the configuration, for editors and for programs that write it
    Schema,
    /// Print a script that completes command lines in a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Write manual pages, one for each command
    Man {
        /// Into which directory
        #[arg(value_name = "DIRECTORY")]
        directory: PathBuf,
    },
}

/// What to measure.
#[derive(Debug, Args)]
pub struct Bench {
    /// Arguments of smcgate-perf
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub arguments: Vec<OsString>,
}

/// Options of `exec`.
#[derive(Debug, Args)]
pub struct Exec {
    /// Where the gateway listens for programs [default: /run/smcgate/local.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The library that is preloaded, if it is not where it is installed
    #[arg(long, value_name = "PATH")]
    pub library: Option<PathBuf>,
    /// Only connections to these ports, and listeners on them: 7010,8000-8099
    #[arg(long, value_name = "PORTS", value_parser = checked::<Ports>)]
    pub ports: Option<String>,
    /// Only connections to these networks, and listeners in them: 10.8.0.0/24,fd00::/8
    #[arg(long, value_name = "NETWORKS", value_parser = checked::<Networks>)]
    pub networks: Option<String>,
    /// Leave connections to these ports alone, and listeners on them
    #[arg(long, value_name = "PORTS", value_parser = checked::<Ports>)]
    pub not_ports: Option<String>,
    /// Leave connections to these networks alone, and listeners in them
    #[arg(long, value_name = "NETWORKS", value_parser = checked::<Networks>)]
    pub not_networks: Option<String>,
    /// Pass bytes by shared memory instead of by a Unix socket
    #[arg(long)]
    pub rings: bool,
    /// With --rings: for so long a reader looks at the memory before it sleeps [default: up to 100,
    /// where that is worth it]
    #[arg(long, value_name = "MICROSECONDS", requires = "rings")]
    pub spin: Option<u32>,
    /// Say on standard error what is decided about each socket
    #[arg(long)]
    pub debug: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// What to do about the rules of nftables and routing that lead connections to listeners.
#[derive(Debug, Subcommand)]
pub enum InterceptCommand {
    /// Install what the listeners of a configuration need, in place of what is there; a gateway
    /// does this itself when it starts
    Add {
        /// Which configuration.
        #[command(flatten)]
        file: ConfigFile,
        /// Print the commands, and do nothing
        #[arg(long)]
        dry_run: bool,
        /// Do it also while a gateway intercepts, which loses the rules that it needs
        #[arg(long)]
        force: bool,
    },
    /// Remove everything that a gateway has left, for example one that was killed
    Remove {
        /// Print the commands, and do nothing
        #[arg(long)]
        dry_run: bool,
        /// Do it also while a gateway intercepts, which loses the rules that it needs
        #[arg(long)]
        force: bool,
    },
    /// Show what is in force now
    Show,
}

/// Which configuration.
#[derive(Debug, Args)]
pub struct ConfigFile {
    /// The configuration, a TOML file
    #[arg(short, long = "config", value_name = "FILE")]
    pub config: PathBuf,
}

/// Options of `check`.
#[derive(Debug, Args)]
pub struct Check {
    /// Which configuration.
    #[command(flatten)]
    pub file: ConfigFile,
    /// End with exit code 1 if there is a warning
    #[arg(long)]
    pub strict: bool,
}

/// Options of `doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Measure with the gateway at this address instead: its listener needs upstream = "measure"
    #[arg(long, value_name = "ADDRESS")]
    pub peer: Option<SocketAddr>,
    /// The gateway of this host, for --peer.
    #[command(flatten)]
    pub gateway: Whom,
}

/// What can be done to links.
#[derive(Debug, Subcommand)]
pub enum LinkCommand {
    /// Delete a link; its connections continue on another link of its group, if there is one
    Delete {
        /// Number of the link, from the first column of `smcgate links`
        #[arg(value_name = "LINK")]
        link: u32,
        /// Delete the link at once, instead of moving its connections first
        #[arg(long)]
        disorderly: bool,
        /// Whom to tell.
        #[command(flatten)]
        gateway: Whom,
    },
    /// Ask for another link in a group, on an RNIC that the group does not use yet
    Add {
        /// Number of the group, from the first column of `smcgate groups`
        #[arg(value_name = "GROUP")]
        group: u32,
        /// Whom to tell.
        #[command(flatten)]
        gateway: Whom,
    },
}

/// What can be done to RNICs.
#[derive(Debug, Subcommand)]
pub enum RnicCommand {
    /// Take an RNIC out of use; its links go down, and their connections continue on other links
    Down {
        /// Name of the RNIC, as in the configuration
        #[arg(value_name = "NAME")]
        rnic: String,
        /// Move the connections to other links first, instead of cutting the links at once
        #[arg(long)]
        orderly: bool,
        /// Whom to tell.
        #[command(flatten)]
        gateway: Whom,
    },
    /// Use an RNIC again; link groups get links on it, and connections spread over them
    Up {
        /// Name of the RNIC, as in the configuration
        #[arg(value_name = "NAME")]
        rnic: String,
        /// Whom to tell.
        #[command(flatten)]
        gateway: Whom,
    },
}

/// Options of `reload`.
#[derive(Debug, Args)]
pub struct Reload {
    /// The gateway that is this process, wherever its admin endpoint listens
    #[arg(long, value_name = "PID", conflicts_with_all = ["admin", "config"])]
    pub pid: Option<u32>,
    /// Whom to tell.
    #[command(flatten)]
    pub gateway: Whom,
}

/// Options of `drain`.
#[derive(Debug, Args)]
pub struct Drain {
    /// Only this listener
    #[arg(long, value_name = "NAME")]
    pub listener: Option<String>,
    /// Close connections on which nothing moves, each at its time within so many seconds
    #[arg(long, value_name = "SECONDS")]
    pub close_idle_over: Option<u32>,
    /// Whom to tell.
    #[command(flatten)]
    pub gateway: Whom,
}

/// Options of `undrain`.
#[derive(Debug, Args)]
pub struct Undrain {
    /// Only this listener
    #[arg(long, value_name = "NAME")]
    pub listener: Option<String>,
    /// Whom to tell.
    #[command(flatten)]
    pub gateway: Whom,
}

/// Which running gateway to talk to.
#[derive(Debug, Args)]
pub struct Whom {
    /// Where its admin endpoint listens [default: 127.0.0.1:9180]
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "config")]
    pub admin: Option<SocketAddr>,
    /// Take the address from `admin.listen` of this configuration
    #[arg(short, long = "config", value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// How to ask a running gateway.
#[derive(Debug, Args)]
pub struct Ask {
    /// Print the gateway's JSON
    #[arg(long)]
    pub json: bool,
    /// Whom to ask.
    #[command(flatten)]
    pub gateway: Whom,
}

/// Options of `top`.
#[derive(Debug, Args)]
pub struct Top {
    /// How often to ask the gateway, in seconds; fractions may be used
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_interval)]
    pub interval: Duration,
    /// Whom to ask.
    #[command(flatten)]
    pub gateway: Whom,
}

/// Options of `conns`.
#[derive(Debug, Args)]
pub struct Conns {
    /// Whom to ask.
    #[command(flatten)]
    pub ask: Ask,
    /// Only connections of this listener
    #[arg(long, value_name = "NAME")]
    pub listener: Option<String>,
    /// Only connections with this transport: smc-r or tcp
    #[arg(long, value_name = "TRANSPORT", value_parser = parse_transport)]
    pub transport: Option<Transport>,
    /// Only those that have each of these words in their addresses, listener, state, transport,
    /// reason or the name of their peer
    #[arg(long, value_name = "WORDS", default_value = "", hide_default_value = true)]
    pub search: String,
    /// Only this page; without it all connections are listed
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub page: Option<u32>,
    /// Rows per page
    #[arg(
        long,
        value_name = "ROWS",
        default_value_t = 100,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(PER_PAGE_MAX))
    )]
    pub per_page: u32,
}

/// Options of `capture`.
#[derive(Debug, Args)]
pub struct Capture {
    /// Where to write it; - is standard output
    #[arg(short, long, value_name = "FILE")]
    pub write: PathBuf,
    /// Only what goes over this RNIC
    #[arg(long, value_name = "NAME")]
    pub rnic: Option<String>,
    /// Only what goes to or from the RNIC with this address
    #[arg(long, value_name = "ADDRESS")]
    pub peer: Option<IpAddr>,
    /// Keep only so many bytes of each frame: 100 are enough for all headers and messages
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..))]
    pub snaplen: Option<u32>,
    /// End after so many frames
    #[arg(long, value_name = "FRAMES", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Whom to ask.
    #[command(flatten)]
    pub gateway: Whom,
}

/// Options of `decode`.
#[derive(Debug, Args)]
pub struct Decode {
    /// The capture, pcap or pcapng; - is standard input
    #[arg(value_name = "FILE.pcap")]
    pub file: PathBuf,
    /// Print JSON, one object per line
    #[arg(long)]
    pub json: bool,
    /// Leave out RDMA writes, acknowledgements and everything else that is not an SMC-R message
    #[arg(long)]
    pub messages: bool,
}

/// A list that the preloaded library will understand, too.
fn checked<T: FromStr<Err = NoChoice>>(text: &str) -> Result<String, NoChoice> {
    text.parse::<T>().map(|_| text.to_owned())
}

fn parse_transport(name: &str) -> Result<Transport, String> {
    Transport::from_name(name).ok_or_else(|| "must be smc-r or tcp".to_owned())
}

/// From a tenth of a second, below which nobody sees a difference, to an hour.
fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "must be a number".to_owned())?;
    if (0.1..=3_600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("must be 0.1 to 3600".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Scripts tell a typo (2) from a gateway that does not answer (1).
    #[test]
    fn usage_errors_exit_with_2_and_help_with_0() {
        for (arguments, kind, code) in [
            (&["run"][..], ErrorKind::MissingRequiredArgument, 2),
            (&["start"], ErrorKind::InvalidSubcommand, 2),
            (&["conns", "--transport", "udp"], ErrorKind::ValueValidation, 2),
            (&["conns", "--per-page", "0"], ErrorKind::ValueValidation, 2),
            (&["stats", "--admin", "1.2.3.4:5", "-c", "f"], ErrorKind::ArgumentConflict, 2),
            (&["exec"], ErrorKind::MissingRequiredArgument, 2),
            (&["exec", "--ports", "http", "true"], ErrorKind::ValueValidation, 2),
            (&["exec", "--not-networks", "10/8", "true"], ErrorKind::ValueValidation, 2),
            (&["top", "--interval", "0"], ErrorKind::ValueValidation, 2),
            (&["top", "--interval", "NaN"], ErrorKind::ValueValidation, 2),
            (&["stats", "--log", "loud"], ErrorKind::ValueValidation, 2),
            (&["--help"], ErrorKind::DisplayHelp, 0),
            (&["--version"], ErrorKind::DisplayVersion, 0),
        ] {
            let all = [&["smcgate"], arguments].concat();
            let error = Cli::try_parse_from(all).unwrap_err();
            assert_eq!((error.kind(), error.exit_code()), (kind, code), "{arguments:?}");
        }
    }
}
