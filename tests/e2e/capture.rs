//! tcpdump on a device.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::clock::wait_until;
use crate::hosts::Host;
use crate::process::Process;

/// A capture that goes on until [`stop`](Self::stop).
pub(crate) struct Capture {
    tcpdump: Process,
    file: PathBuf,
}

impl Capture {
    /// Captures what passes `device` of `host`.
    pub(crate) fn start(host: &Host, device: &str, logs: &Path) -> Self {
        let file = logs.join("wire.pcap");
        let mut command = Command::new("tcpdump");
        // tcpdump must stay root: another user could not write to the folder of the logs.
        command.args(["-i", device, "-U", "-Z", "root", "-B", "65536", "-w"]).arg(&file);
        let tcpdump = Process::start(host, logs, "tcpdump", &mut command);
        wait_until("tcpdump listens", LIMIT, || tcpdump.log().contains("listening on"));
        Self { tcpdump, file }
    }

    /// Ends the capture when all that was sent so far is in its file, which it returns. The last
    /// packet is a datagram from `from` to `to`, which must pass the device: the kernel hands over
    /// its buffer when it likes, but in order.
    pub(crate) fn stop(mut self, from: &Host, to: impl Into<IpAddr>) -> PathBuf {
        let to = to.into();
        let anywhere: IpAddr = match to {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let send = || {
            let socket = UdpSocket::bind((anywhere, 0)).expect("a port is free");
            socket.send_to(MARK, (to, DISCARD)).expect("there is a route");
        };
        from.enter(send);
        wait_until("tcpdump has written the last packet", LIMIT, || {
            let bytes = fs::read(&self.file).expect("tcpdump has made it");
            bytes.windows(MARK.len()).rev().any(|window| window == MARK)
        });
        self.tcpdump.signal(Signal::INT);
        let status = self.tcpdump.wait(LIMIT);
        assert!(status.success(), "tcpdump: {}", self.tcpdump.log());
        self.file
    }
}

const MARK: &[u8] = b"smcgate: this is the end of the capture";
/// Nobody listens there, and a gateway would not mind.
const DISCARD: u16 = 9;
const LIMIT: Duration = Duration::from_secs(30);
