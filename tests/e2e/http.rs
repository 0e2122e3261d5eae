//! As much HTTP as it takes to ask a gateway.

use std::io::{self, Read, Write};
use std::net::SocketAddrV4;
use std::time::Duration;

use crate::hosts::Host;

/// Status code and body of `GET path`, asked on `host`.
pub(crate) fn get(host: &Host, admin: SocketAddrV4, path: &str) -> io::Result<(u16, String)> {
    let mut stream = host.connect(admin)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {admin}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Ok((status.ok_or(io::ErrorKind::InvalidData)?, body.to_owned()))
}
