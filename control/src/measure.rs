//! The server that `smcgate doctor --peer` measures with: `upstream = "measure"` leads to it.
//!
//! It listens on loopback, on threads of its own, and knows no state. What a connection asks for is
//! its first byte:
//!
//! | byte | the server |
//! |---|---|
//! | `R` | sends back what comes |
//! | `U` | reads until the end, then says how many bytes came, as eight bytes |
//! | `D` | sends until the client has enough |

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::panic;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};
use std::thread;
use std::time::Duration;

use smcr_engine::clock::Clock;

use crate::supervise;

/// Asks for its bytes back.
pub const ROUND_TRIPS: u8 = b'R';
/// Sends as much as it can.
pub const UP: u8 = b'U';
/// Receives as much as it can.
pub const DOWN: u8 = b'D';

/// Where the server listens; none if no configuration has asked for it.
pub fn address() -> Option<SocketAddr> {
    SOCKET.get()?.as_ref()?.local_addr().ok()
}

/// Has the server listen. Nobody is served before [`serve`].
pub fn listen() {
    SOCKET.get_or_init(|| match TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) {
        Ok(socket) => Some(socket),
        Err(error) => {
            tracing::warn!(%error, "nobody will answer measurements");
            None
        }
    });
}

/// Starts the server if it listens, and does not run already.
pub fn serve() {
    let Some(Some(socket)) = SOCKET.get() else { return };
    STARTED.call_once(|| {
        let served = socket.try_clone().and_then(accept_from);
        if let Err(error) = served {
            tracing::warn!(%error, "nobody will answer measurements");
        }
    });
}

fn accept_from(listener: TcpListener) -> io::Result<()> {
    supervise::spawn("measure", move || {
        for client in listener.incoming() {
            // A client that has gone already, or descriptors that have run out for a moment.
            let Ok(client) = client else {
                thread::sleep(Duration::from_millis(10));
                continue;
            };
            if CLIENTS.fetch_add(1, Ordering::Relaxed) >= CLIENTS_MAX {
                CLIENTS.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let served = thread::Builder::new().name("measured".to_owned()).spawn(move || {
                supervise::may_panic();
                // Whatever is wrong with the connection, its client sees.
                let _ = panic::catch_unwind(|| answer(client));
                CLIENTS.fetch_sub(1, Ordering::Relaxed);
            });
            if served.is_err() {
                CLIENTS.fetch_sub(1, Ordering::Relaxed);
            }
        }
    })?;
    Ok(())
}

/// Serves one client.
fn answer(mut client: TcpStream) -> io::Result<()> {
    client.set_nodelay(true)?;
    client.set_read_timeout(Some(SILENCE_MAX))?;
    client.set_write_timeout(Some(SILENCE_MAX))?;
    let clock = Clock::new();
    let is_late = || clock.now().0 > u64::try_from(TIME_MAX.as_nanos()).expect("seconds");
    let mut wish = [0];
    client.read_exact(&mut wish)?;
    let mut bytes = vec![0; PORTION];
    let mut count = 0_u64;
    while !is_late() {
        match wish[0] {
            ROUND_TRIPS => match client.read(&mut bytes)? {
                0 => return Ok(()),
                len => client.write_all(&bytes[..len])?,
            },
            UP => match client.read(&mut bytes)? {
                0 => return client.write_all(&count.to_be_bytes()),
                len => count += len as u64,
            },
            DOWN => client.write_all(&bytes)?,
            _ => return Ok(()),
        }
    }
    Ok(())
}

static SOCKET: OnceLock<Option<TcpListener>> = OnceLock::new();
static STARTED: Once = Once::new();
static CLIENTS: AtomicUsize = AtomicUsize::new(0);
/// More than that at once are turned away: nobody can make this host busy with measurements.
const CLIENTS_MAX: usize = 8;
/// A measurement takes no longer.
const TIME_MAX: Duration = Duration::from_secs(20);
/// Nor does a client keep silent for longer.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// Bytes that are read or written at once.
const PORTION: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use super::*;

    fn connect(wish: u8) -> TcpStream {
        listen();
        serve();
        let mut server = TcpStream::connect(address().unwrap()).unwrap();
        server.write_all(&[wish]).unwrap();
        server
    }

    #[test]
    fn each_wish_is_served() {
        let mut echo = connect(ROUND_TRIPS);
        echo.write_all(b"ping").unwrap();
        let mut back = [0; 4];
        echo.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"ping");
        let mut up = connect(UP);
        up.write_all(&[7; 100_000]).unwrap();
        up.shutdown(Shutdown::Write).unwrap();
        let mut count = [0; 8];
        up.read_exact(&mut count).unwrap();
        assert_eq!(u64::from_be_bytes(count), 100_000);
        let mut down = connect(DOWN);
        let mut bytes = vec![1; 300_000];
        down.read_exact(&mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!(connect(b'?').read(&mut [0]).unwrap(), 0, "an unknown wish ends at once");
    }
}
