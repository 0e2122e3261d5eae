//! The program: arguments in, exit code out.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use smcgate::capture::Request;
use smcgate::cli::{
    Ask, Capture, Cli, Command, Conns, Decode, Doctor, Drain, LinkCommand, Reload, RnicCommand,
    Top, Undrain, Whom,
};
use smcgate::config::Config;
use smcgate::device::Devices;
use smcgate::operate::Operation;
use smcgate::reload::socket;
use smcgate::stats::{ConnectionQuery, Stats};
use smcgate::tools::capture::capture;
use smcgate::tools::client::{self, Client, DEFAULT_ADMIN};
use smcgate::tools::decode::{DecodeError, decode};
use smcgate::tools::top::{self, TopError};
use smcgate::tools::{bench, check, doctor, documents, exec, intercept};
use smcgate::{log, signals, start, supervise};
use smcr_os::counting::Counting;

/// The relay allocates rarely, which the counter proves; the control thread and a heap that stays
/// small over weeks like this one.
#[global_allocator]
static ALLOCATOR: Counting<mimalloc::MiMalloc> = Counting(mimalloc::MiMalloc);

fn main() -> ExitCode {
    let Cli { log, command } = Cli::parse();
    let result = match command {
        Command::Run(file) => run(&file.config, log),
        // These two print what they find themselves, and know what it is worth.
        Command::Check(check) => return check::run(&check.file.config, check.strict),
        Command::Doctor(arguments) => match examine(&arguments) {
            Ok(code) => return code,
            Err(failure) => Err(failure),
        },
        Command::Stats(ask) => stats(&ask, client::stats_text),
        Command::Groups(ask) => stats(&ask, client::groups_text),
        Command::Links(ask) => stats(&ask, client::links_text),
        Command::Rnics(ask) => stats(&ask, client::rnics_text),
        Command::Intercept(command) => {
            intercept::run(&command).map_err(|(code, why)| Failure { code, why })
        }
        Command::Reload(arguments) => reload(&arguments),
        Command::Drain(Drain { listener, close_idle_over: close_idle_over_s, gateway }) => {
            operate(&gateway, &Operation::Drain { listener, close_idle_over_s })
        }
        Command::Undrain(Undrain { listener, gateway }) => {
            operate(&gateway, &Operation::Undrain { listener })
        }
        Command::Link(command) => link(command),
        Command::Rnic(command) => rnic(command),
        Command::Top(arguments) => watch(&arguments),
        Command::Conns(conns) => connections(conns),
        Command::Capture(arguments) => capture_to(arguments),
        Command::Decode(arguments) => decode_file(&arguments),
        Command::Exec(arguments) => match exec::become_program(&arguments) {
            Err((code, why)) => Err(Failure { code, why }),
        },
        Command::Schema => printed(documents::schema(&mut io::stdout().lock())),
        Command::Completions { shell } => {
            printed(documents::completions(shell, &mut io::stdout().lock()))
        }
        Command::Man { directory } => documents::man(&directory).map_err(Failure::failed),
        Command::Bench(bench) => match bench::become_harness(&bench.arguments) {
            Err(why) => Err(Failure::failed(why)),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { code, why }) => {
            // Nobody is left to tell if standard error is gone.
            writeln!(io::stderr(), "smcgate: {why}").ok();
            ExitCode::from(code)
        }
    }
}

/// Why a command did not work: the exit code, and one line.
struct Failure {
    code: u8,
    why: String,
}

impl Failure {
    /// Exit code 1: it was tried.
    fn failed(why: impl Display) -> Self {
        Self { code: 1, why: why.to_string() }
    }

    /// Exit code 2: the configuration is wrong, or asks for what this host cannot give.
    fn misconfigured(why: impl Display) -> Self {
        Self { code: 2, why: why.to_string() }
    }
}

fn run(file: &Path, filter: Option<String>) -> Result<(), Failure> {
    let here = Devices::addresses_here();
    let config = Config::load_at(file, &here).map_err(Failure::misconfigured)?;
    log::start(filter.as_deref(), config.log);
    supervise::abort_on_panic();
    start::run(config, file).map_err(|error| match error.is_misconfigured() {
        true => Failure::misconfigured(error),
        false => Failure::failed(error),
    })
}

/// Looks at this host, or measures with a peer.
fn examine(arguments: &Doctor) -> Result<ExitCode, Failure> {
    let Some(peer) = arguments.peer else { return Ok(doctor::run(arguments.json)) };
    let admin = admin(&arguments.gateway)?;
    doctor::peer::run(peer, admin, arguments.json).map_err(Failure::failed)
}

fn load(file: &Path) -> Result<Config, Failure> {
    Config::load(file).map_err(Failure::misconfigured)
}

fn client(gateway: &Whom) -> Result<Client, Failure> {
    admin(gateway).map(Client::new)
}

fn admin(gateway: &Whom) -> Result<SocketAddr, Failure> {
    Ok(match (gateway.admin, &gateway.config) {
        (Some(address), _) => address,
        (None, None) => DEFAULT_ADMIN,
        (None, Some(file)) => load(file)?.admin.listen.ok_or_else(|| {
            let file = file.display();
            Failure::misconfigured(format!("{file}: admin.listen: not there, so nobody answers"))
        })?,
    })
}

fn reload(arguments: &Reload) -> Result<(), Failure> {
    let Some(pid) = arguments.pid else { return operate(&arguments.gateway, &Operation::Reload) };
    let notes = socket::ask(pid).map_err(|error| match error.is_wrong() {
        true => Failure::misconfigured(error),
        false => Failure::failed(error),
    })?;
    print(&lines(&notes))
}

fn link(command: LinkCommand) -> Result<(), Failure> {
    let (operation, gateway) = match command {
        LinkCommand::Delete { link, disorderly, gateway } => {
            (Operation::LinkDelete { link, orderly: !disorderly }, gateway)
        }
        LinkCommand::Add { group, gateway } => (Operation::LinkAdd { group }, gateway),
    };
    operate(&gateway, &operation)
}

/// Has a gateway do something, and prints what it says about that.
fn operate(gateway: &Whom, operation: &Operation) -> Result<(), Failure> {
    let notes = client(gateway)?.operate(operation).map_err(|error| match error.is_wrong() {
        true => Failure::misconfigured(error),
        false => Failure::failed(error),
    })?;
    print(&lines(&notes))
}

fn lines(notes: &[String]) -> String {
    notes.iter().map(|note| format!("{note}\n")).collect()
}

fn rnic(command: RnicCommand) -> Result<(), Failure> {
    let (operation, gateway) = match command {
        RnicCommand::Down { rnic, orderly, gateway } => {
            (Operation::RnicDown { rnic, orderly }, gateway)
        }
        RnicCommand::Up { rnic, gateway } => (Operation::RnicUp { rnic }, gateway),
    };
    operate(&gateway, &operation)
}

fn stats(ask: &Ask, text: fn(&Stats) -> String) -> Result<(), Failure> {
    let answer = client(&ask.gateway)?.stats().map_err(Failure::failed)?;
    match ask.json {
        true => print(&format!("{:#}\n", answer.json)),
        false => print(&text(&answer.value)),
    }
}

fn watch(arguments: &Top) -> Result<(), Failure> {
    let admin = admin(&arguments.gateway)?;
    top::run(admin, arguments.interval).map_err(|error| match error {
        TopError::NoTerminal => Failure::misconfigured(error),
        TopError::Io(_) => Failure::failed(error),
    })
}

fn connections(conns: Conns) -> Result<(), Failure> {
    let Conns { ask, listener, transport, search, page, per_page } = conns;
    let client = client(&ask.gateway)?;
    let query = ConnectionQuery {
        listener,
        transport,
        page: page.unwrap_or(1),
        per_page,
        search,
        ..ConnectionQuery::default()
    };
    let answer = match page {
        Some(_) => client.connections(&query).map(|answer| answer.value),
        None => client.all_connections(&query),
    };
    let rows = answer.map_err(Failure::failed)?;
    if !ask.json {
        return print(&client::connections_text(&rows));
    }
    let json = serde_json::to_string_pretty(&rows).map_err(Failure::failed)?;
    print(&format!("{json}\n"))
}

fn capture_to(arguments: Capture) -> Result<(), Failure> {
    let Capture { write, rnic, peer, snaplen, count, gateway } = arguments;
    let request = Request { rnic, peer, snap_len: snaplen, count };
    let admin = admin(&gateway)?;
    let name = write.display();
    let mut out: Box<dyn Write> = if write == Path::new("-") {
        Box::new(io::stdout().lock())
    } else {
        let file = File::create(&write);
        let file = file.map_err(|error| Failure::failed(format!("{name}: {error}")))?;
        Box::new(BufWriter::new(file))
    };
    let captured = capture(admin, &request, &mut out, signals::on_stop).map_err(Failure::failed)?;
    let said = format!("{} frames captured, {} dropped", captured.frames, captured.dropped);
    // Standard output may be the capture.
    writeln!(io::stderr(), "smcgate: {said}").ok();
    match captured.is_complete {
        true => Ok(()),
        false => Err(Failure::failed(
            "the gateway has ended the capture: it has stopped, or nothing was read for 5 s",
        )),
    }
}

fn decode_file(arguments: &Decode) -> Result<(), Failure> {
    let name = arguments.file.display();
    let fail = |error: &dyn Display| Failure::failed(format!("{name}: {error}"));
    let input: Box<dyn Read> = if arguments.file == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(&arguments.file).map_err(|error| fail(&error))?)
    };
    let mut out = BufWriter::new(io::stdout().lock());
    let result = decode(input, &mut |line| {
        if arguments.messages && !line.words.is_message() {
            return Ok(());
        }
        match arguments.json {
            true => writeln!(out, "{}", serde_json::to_string(line)?),
            false => writeln!(out, "{line}"),
        }
    });
    match (result, out.flush()) {
        (Err(DecodeError::Output(error)), _) | (Ok(_), Err(error)) => printed(Err(error)),
        (Err(error), _) => Err(fail(&error)),
        (Ok(summary), Ok(())) if summary.damaged => {
            let frames = summary.frames;
            Err(fail(&format_args!("damaged behind frame {frames}, what follows is missing")))
        }
        (Ok(_), Ok(())) => Ok(()),
    }
}

fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    printed(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// A reader that has seen enough, such as `head`, is no failure.
fn printed(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::failed(error)),
        Ok(()) | Err(_) => Ok(()),
    }
}
