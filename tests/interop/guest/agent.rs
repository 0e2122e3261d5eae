//! The agent in a guest: runs programs for callers outside.

use std::io::{self, BufReader, Read};
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;

use rustix::process::{Pid, Signal, kill_process_group};

use crate::protocol::{ENDED, KILLED, STDERR, STDOUT, read_request, write_frame};

/// Serves callers, each in a thread of its own, for ever.
pub(crate) fn serve(at: SocketAddrV4) -> io::Result<()> {
    let listener = TcpListener::bind(at)?;
    loop {
        let (caller, _) = listener.accept()?;
        thread::spawn(|| {
            // If the result cannot be sent, the caller has gone away.
            drop(run_for(caller));
        });
    }
}

/// Runs one program to its end.
fn run_for(mut caller: TcpStream) -> io::Result<()> {
    let mut requests = BufReader::new(caller.try_clone()?);
    let request = read_request(&mut requests)?;
    let (program, arguments) = request.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(arguments).process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            write_frame(&mut caller, STDERR, format!("{program}: {error}\n").as_bytes())?;
            return write_frame(&mut caller, ENDED, &127_u32.to_be_bytes());
        }
    };
    let group = Pid::from_child(&child);
    // This ends when the caller ends, or when we shut the connection down after the program.
    let watch = thread::spawn(move || {
        drop(requests.read(&mut [0]));
        // The program may have ended by itself.
        kill_process_group(group, Signal::KILL).ok();
    });
    relay(&mut child, &caller);
    let code = child.wait()?.code().map_or(KILLED, i32::cast_unsigned);
    let outcome = write_frame(&mut caller, ENDED, &code.to_be_bytes());
    drop(caller.shutdown(std::net::Shutdown::Write));
    drop(watch.join());
    outcome
}

/// Passes on the output of the program until it has closed standard output and standard error.
fn relay(child: &mut Child, caller: &TcpStream) {
    let caller = Mutex::new(caller);
    let pass = |mut from: Box<dyn Read + Send>, kind: u8| {
        let mut buffer = vec![0; 65_536];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let mut caller: &TcpStream = &caller.lock().expect("nobody panics with it");
            if write_frame(&mut caller, kind, &buffer[..count]).is_err() {
                return;
            }
        }
    };
    let stdout = child.stdout.take().expect("it was given a pipe");
    let stderr = child.stderr.take().expect("it was given a pipe");
    thread::scope(|scope| {
        scope.spawn(|| pass(Box::new(stdout), STDOUT));
        pass(Box::new(stderr), STDERR);
    });
}
