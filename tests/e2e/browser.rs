//! Chromium without a window, driven over WebDriver, as an operator would use it.

use std::io::{self, Read, Write};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::clock::wait_until;
use crate::gateway::local;
use crate::hosts::{Host, Hosts};
use crate::process::{Process, wait_for_listener};

/// Where the driver listens, on the host of the browser.
const DRIVER_PORT: u16 = 9515;
/// A browser starts slowly on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A browser on a host, which ends when dropped.
pub(crate) struct Browser<'h> {
    host: &'h Host,
    session: String,
    profile: std::path::PathBuf,
    _driver: Process,
}

impl<'h> Browser<'h> {
    /// Starts one on `host`.
    pub(crate) fn start(hosts: &Hosts, host: &'h Host) -> Self {
        let profile = hosts.logs.join(format!("chromium-{}", host.device));
        let mut command = Command::new("chromedriver");
        command.arg(format!("--port={DRIVER_PORT}"));
        let name = format!("chromedriver-{}", host.device);
        let driver = Process::start(host, &hosts.logs, &name, &mut command);
        wait_for_listener(host, local(DRIVER_PORT));
        let arguments = json!([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--window-size=1400,1000",
            format!("--user-data-dir={}", profile.display()),
        ]);
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": {"binary": "/usr/bin/chromium", "args": arguments},
        }}});
        let mut browser = Self { host, session: "/session".to_owned(), profile, _driver: driver };
        let session = browser.command("POST", "", &wanted);
        let id = session["sessionId"].as_str().expect("WebDriver says so");
        browser.session = format!("/session/{id}");
        browser
    }

    /// Shows a page.
    pub(crate) fn open(&self, url: &str) {
        self.command("POST", "/url", &json!({"url": url}));
    }

    /// What the body of a function returns that runs in the page.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.command("POST", "/execute/sync", &json!({"script": script, "args": []}))
    }

    /// Waits until a condition holds in the page.
    pub(crate) fn wait_until(&self, condition: &str) {
        wait_until(condition, Duration::from_secs(20), || {
            self.run(&format!("return Boolean({condition});")) == true
        });
    }

    /// Types into the element that a selector finds.
    pub(crate) fn write(&self, selector: &str, text: &str) {
        let found = json!({"using": "css selector", "value": selector});
        let found = self.command("POST", "/element", &found);
        let id = found.as_object().and_then(|found| found.values().next());
        let id = id.and_then(Value::as_str).expect("WebDriver says so");
        self.command("POST", &format!("/element/{id}/value"), &json!({"text": text}));
    }

    /// Has the page believe that the operator likes it dark, or light.
    pub(crate) fn set_dark(&self, dark: bool) {
        let value = if dark { "dark" } else { "light" };
        let feature = json!([{"name": "prefers-color-scheme", "value": value}]);
        let parameters = json!({"features": feature});
        let command = json!({"cmd": "Emulation.setEmulatedMedia", "params": parameters});
        self.command("POST", "/goog/cdp/execute", &command);
    }

    /// What the page has complained about since the last call.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let log = self.command("POST", "/se/log", &json!({"type": "browser"}));
        let entries = log.as_array().expect("a list of entries");
        entries.iter().map(|entry| entry["message"].to_string()).collect()
    }

    fn command(&self, method: &str, path: &str, body: &Value) -> Value {
        let path = format!("{}{path}", self.session);
        let (status, answer) = self
            .request(method, &path, &body.to_string())
            .unwrap_or_else(|error| panic!("chromedriver: {path}: {error}"));
        assert_eq!(status, 200, "{path} {body}: {answer}");
        let mut answer: Value = serde_json::from_str(&answer).expect("WebDriver is JSON");
        answer["value"].take()
    }

    fn request(&self, method: &str, path: &str, body: &str) -> io::Result<(u16, String)> {
        let driver = local(DRIVER_PORT);
        let mut stream = self.host.connect(driver)?;
        stream.set_read_timeout(Some(LIMIT))?;
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {driver}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )?;
        let mut answer = Vec::new();
        let mut part = [0; 16 * 1024];
        loop {
            if let Some(whole) = whole_answer(&answer) {
                return Ok(whole);
            }
            match stream.read(&mut part)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => answer.extend_from_slice(&part[..count]),
            }
        }
    }
}

impl Drop for Browser<'_> {
    fn drop(&mut self) {
        // Its processes are those of the driver, which ends them only if it is told to.
        drop(self.request("DELETE", &self.session, ""));
        // Megabytes that nobody needs. A process that still ends may write to it; then it stays.
        drop(std::fs::remove_dir_all(&self.profile));
    }
}

/// Status and body, if everything has arrived. The driver may keep the connection open.
fn whole_answer(answer: &[u8]) -> Option<(u16, String)> {
    let text = std::str::from_utf8(answer).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    (body.len() >= length.unwrap_or(0usize)).then(|| (status, body.to_owned()))
}
