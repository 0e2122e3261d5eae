//! Whoever started this process and looks after it, if that is systemd: it is told how we are, and
//! may have bound sockets for us.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use listenfd::ListenFd;
use sd_notify::NotifyState;
use smcr_proto::Instant;

use crate::listener::local_address;
use crate::passed::Passed;

/// Speaks to whoever started us. Does nothing where nobody wants to hear.
#[derive(Debug, Default)]
pub struct Service {
    hears: bool,
    /// How often it must be told that we are alive.
    watchdog: Option<Duration>,
    alive_at: Option<Instant>,
    /// Sockets that were bound for us.
    sockets: Arc<Passed>,
}

impl Service {
    /// What the environment of this process says.
    pub fn of_this_process() -> Self {
        let mut sockets = Vec::new();
        let mut passed = ListenFd::from_env();
        for index in 0..passed.len() {
            match passed.take_tcp_listener(index) {
                Ok(Some(socket)) => {
                    let socket = OwnedFd::from(socket);
                    // Nobody may wait at it, whoever it is for.
                    if let Err(error) = rustix::io::ioctl_fionbio(&socket, true) {
                        tracing::warn!(%error, "a socket that was passed cannot be used");
                        continue;
                    }
                    sockets.extend(local_address(&socket).map(|address| (address, socket)));
                }
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "a socket that was passed is none of TCP"),
            }
        }
        let mut micros = 0;
        let watchdog = sd_notify::watchdog_enabled(false, &mut micros);
        // Half the time is what systemd recommends.
        let watchdog = watchdog.then(|| Duration::from_micros(micros) / 2);
        let hears = std::env::var_os("NOTIFY_SOCKET").is_some();
        let sockets = Arc::new(Passed::new(sockets));
        Self { hears, watchdog, alive_at: None, sockets }
    }

    /// The sockets that were bound for us.
    pub fn sockets(&self) -> &Arc<Passed> {
        &self.sockets
    }

    /// Connections are served from now on.
    pub(crate) fn ready(&self) {
        self.tell(&[NotifyState::Ready]);
    }

    /// Another configuration is looked at; [`ready`](Self::ready) says that this is over.
    pub(crate) fn reloading(&self) {
        match NotifyState::monotonic_usec_now() {
            Ok(now) => self.tell(&[NotifyState::Reloading, now]),
            Err(_) => self.tell(&[NotifyState::Reloading]),
        }
    }

    /// No new connections are taken any more.
    pub(crate) fn stopping(&self) {
        self.tell(&[NotifyState::Stopping]);
    }

    /// The control thread goes on. Call it at least once a second.
    pub(crate) fn alive(&mut self, now: Instant) {
        let Some(every) = self.watchdog else { return };
        if self.alive_at.is_none_or(|at| now.since(at) >= every.min(LIFE_SIGN_MAX)) {
            self.alive_at = Some(now);
            self.tell(&[NotifyState::Watchdog]);
        }
    }

    /// When [`alive`](Self::alive) must be called, at the latest.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        Some(self.alive_at? + self.watchdog?)
    }

    fn tell(&self, what: &[NotifyState<'_>]) {
        if self.hears
            && let Err(error) = sd_notify::notify(false, what)
        {
            tracing::warn!(%error, "whoever started us does not hear us");
        }
    }
}

/// More often would be of no use.
const LIFE_SIGN_MAX: Duration = Duration::from_secs(1);
