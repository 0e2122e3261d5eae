//! Keeps slow clients from holding the endpoint: few connections, each with a deadline.
//!
//! The HTTP server below `axum::serve` has no timeout for a request that arrives one byte an hour.
//! Here a whole connection, idle times between its requests included, lasts [`LIFETIME`] at most; a
//! client that keeps connections alive simply opens the next one.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

/// Connections served at once; the next ones wait in the kernel's accept queue.
pub(super) const CONNECTIONS_MAX: usize = 64;
/// How long one connection may last, whatever it does.
pub(super) const LIFETIME: Duration = Duration::from_secs(5);
/// Pause after a failed accept: descriptors may be short for a while.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// A listener whose connections are counted and end by themselves.
#[derive(Debug)]
pub(super) struct Guarded {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl Guarded {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(CONNECTIONS_MAX)) }
    }
}

impl Listener for Guarded {
    type Io = Visit;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Visit, SocketAddr) {
        let place =
            Arc::clone(&self.places).acquire_owned().await.expect("the semaphore is never closed");
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    let deadline = Box::pin(tokio::time::sleep(LIFETIME));
                    return (Visit { stream, deadline, _place: place }, address);
                }
                Err(error) => {
                    tracing::debug!(%error, "admin accept failed");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// One connection, until its deadline.
#[derive(Debug)]
pub(super) struct Visit {
    stream: TcpStream,
    deadline: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Visit {
    /// An error once the deadline has passed; registers for its wake-up before that.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.deadline.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Visit {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Visit {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
