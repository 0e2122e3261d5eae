//! The operators' endpoint: HTTP on a thread of its own.
//!
//! | path | answer |
//! |---|---|
//! | `/` | a page for people, with what it needs below `/page/` |
//! | `/stats` | [`Stats`](crate::stats::Stats) as JSON |
//! | `/connections` | [`ConnectionPage`](crate::stats::ConnectionPage) as JSON |
//! | `/history` | the last 15 minutes: [`Columns`](crate::stats::Columns) as JSON |
//! | `/metrics` | the same numbers as Prometheus text |
//! | `/healthz` | 200 while this thread runs |
//! | `/readyz` | 200, or 503 with the reasons; `?listener=NAME` asks about one |
//! | `/config` | the configuration in force, as JSON |
//! | `POST /operate` | obeys an [`Operation`](crate::operate::Operation), sent as JSON |
//!
//! Everything else only reads. A web page that an operator looks at cannot operate the gateway: a
//! browser asks for permission before it sends JSON to another site, and is refused here. The
//! thread has its own single-threaded runtime. A request costs the pollers no more than the atomics
//! that they publish. The control thread answers one request at a time, and builds the rows of one
//! page of connections, unless it has to search all of them. If it does not answer, requests get
//! 503. Errors are JSON: `{"error": "…"}`.

mod asking;
mod guard;
mod history;
mod metrics;
mod page;
mod routes;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use crate::stats::Provider;
use crate::supervise;
use asking::Desk;
use guard::Guarded;
use history::Keeper;

/// What operators are told if hosts other than this one can reach the endpoint.
pub const IS_PUBLIC: &str = "whoever reaches this address reads all statistics, and can take \
                             listeners, links and RNICs out of service";

/// The running endpoint. Dropping it stops the thread and closes the listening socket.
#[derive(Debug)]
pub struct AdminThread {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Binds `listen` and serves `provider` from a new thread.
///
/// The socket is bound when this returns; port 0 takes any free port, see
/// [`AdminThread::address`].
///
/// # Errors
///
/// If the address cannot be bound, or a thread or runtime cannot be made. The caller knows which
/// address, and says so.
pub fn spawn(listen: SocketAddr, provider: Arc<dyn Provider>) -> io::Result<AdminThread> {
    let bound = std::net::TcpListener::bind(listen)?;
    bound.set_nonblocking(true)?;
    let address = bound.local_addr()?;
    let (stop, mut stopped) = oneshot::channel();
    let history = Keeper::default();
    // If it begins anew, it begins with a runtime of its own: who knows what became of the other.
    let thread = supervise::spawn("admin", move || {
        if let Err(error) = serve(&bound, &provider, &history, &mut stopped) {
            panic!("the endpoint cannot be served: {error}");
        }
    })?;
    Ok(AdminThread { address, stop: Some(stop), thread: Some(thread) })
}

/// Serves at `bound` until somebody says that it is time to stop.
fn serve(
    bound: &std::net::TcpListener,
    provider: &Arc<dyn Provider>,
    history: &Keeper,
    stopped: &mut oneshot::Receiver<()>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_start(supervise::may_panic)
        .build()?;
    let desk = Desk::new(Arc::clone(provider));
    let router = routes::router(desk, history.clone(), bound.local_addr()?);
    runtime.block_on(async {
        let listener = Guarded::new(tokio::net::TcpListener::from_std(bound.try_clone()?)?);
        // No tasks of their own: a panic of a task would end that task and nobody would notice,
        // while one of these ends all of it, and all of it begins anew.
        tokio::select! {
            biased;
            // A dropped sender means the same as a message: stop. What is still being served is
            // dropped with the runtime; an operator's question is not worth a slow shutdown.
            _ = stopped => Ok(()),
            never = history.keep(&**provider) => match never {},
            served = axum::serve(listener, router).into_future() => {
                served.and_then(|()| Err(io::Error::other("nobody is served any more")))
            }
        }
    })
}

impl AdminThread {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops the thread and waits for it. Requests in progress are cut off.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for AdminThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was printed by the panic hook; there is nothing to add.
            thread.join().ok();
        }
    }
}

#[cfg(test)]
mod tests;
