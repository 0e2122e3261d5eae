//! `smcgate stats`, `conns`, `groups`, `links`, `rnics`: questions to a running gateway, and tables
//! of the answers; `smcgate link`, `rnic`: commands to it.

mod tables;

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::Body;
use ureq::http::{Response, StatusCode};

use crate::operate::Operation;
use crate::stats::{Columns, ConnectionPage, ConnectionQuery, PER_PAGE_MAX, SCHEMA, Sort, Stats};

pub use tables::{connections_text, groups_text, links_text, rnics_text, stats_text};

/// Where a gateway's admin endpoint listens if its configuration does not say.
pub const DEFAULT_ADMIN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9180);

/// How long a gateway may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest answer that is read, in bytes.
const ANSWER_MAX: u64 = 64 << 20;

/// Why there is no answer. Displays on one line.
#[derive(Debug)]
pub struct ClientError {
    admin: SocketAddr,
    why: String,
    is_wrong: bool,
}

impl ClientError {
    /// Whether what the operator wrote is wrong, rather than that it did not work.
    pub fn is_wrong(&self) -> bool {
        self.is_wrong
    }
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gateway at {}: {}", self.admin, self.why)
    }
}

impl std::error::Error for ClientError {}

/// One gateway, as seen from its admin endpoint.
#[derive(Debug)]
pub struct Client {
    admin: SocketAddr,
    agent: ureq::Agent,
}

impl Client {
    /// Asks the endpoint at this address. Nothing is sent yet.
    pub fn new(admin: SocketAddr) -> Self {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            // The environment's proxy is for the web, not for this host's gateway.
            .proxy(None)
            .build()
            .new_agent();
        Self { admin, agent }
    }

    /// The gateway's `GET /stats`, keys we do not know included.
    ///
    /// # Errors
    ///
    /// [`ClientError`] if nobody answers, or not with this schema.
    pub fn stats(&self) -> Result<Fetched<Stats>, ClientError> {
        self.ask("/stats", &[])
    }

    /// The gateway's `GET /history`.
    ///
    /// # Errors
    ///
    /// As [`stats`](Self::stats).
    pub fn history(&self) -> Result<Fetched<Columns>, ClientError> {
        self.ask("/history", &[])
    }

    /// One page of the gateway's `GET /connections`.
    ///
    /// # Errors
    ///
    /// As [`stats`](Self::stats).
    pub fn connections(
        &self,
        query: &ConnectionQuery,
    ) -> Result<Fetched<ConnectionPage>, ClientError> {
        let mut parameters =
            vec![("page", query.page.to_string()), ("per_page", query.per_page.to_string())];
        // A gateway that is older than this program does not know these two.
        if !query.search.is_empty() {
            parameters.push(("search", query.search.clone()));
        }
        if query.sort != Sort::default() {
            parameters.push(("sort", query.sort.name().to_owned()));
        }
        parameters.extend(query.listener.clone().map(|name| ("listener", name)));
        parameters.extend(query.transport.map(|it| ("transport", it.name().to_owned())));
        self.ask("/connections", &parameters)
    }

    /// All pages of the gateway's connections that match `query`, as one.
    ///
    /// Pages are asked one after another while connections come and go, so one that moved may be
    /// missing; none is there twice.
    ///
    /// # Errors
    ///
    /// As [`stats`](Self::stats).
    pub fn all_connections(&self, query: &ConnectionQuery) -> Result<ConnectionPage, ClientError> {
        let mut query = ConnectionQuery { page: 1, per_page: PER_PAGE_MAX, ..query.clone() };
        let mut all = self.connections(&query)?.value;
        let mut last_len = all.connections.len();
        while last_len == PER_PAGE_MAX as usize {
            query.page += 1;
            let page = self.connections(&query)?.value;
            last_len = page.connections.len();
            all.connections.extend(page.connections);
        }
        all.connections.sort_by_key(|row| row.id);
        all.connections.dedup_by_key(|row| row.id);
        all.total = all.connections.len() as u64;
        all.per_page = u32::try_from(all.connections.len()).unwrap_or(u32::MAX).max(1);
        Ok(all)
    }

    /// Tells the gateway to do something. It has begun when this returns. Returns what was done
    /// already, in words.
    ///
    /// # Errors
    ///
    /// As [`stats`](Self::stats), and why the gateway will not.
    pub fn operate(&self, operation: &Operation) -> Result<Vec<String>, ClientError> {
        let fail = |why: String| ClientError { admin: self.admin, why, is_wrong: false };
        let request = self.agent.post(format!("http://{}/operate", self.admin));
        let response = request.send_json(operation).map_err(|error| fail(no_answer(&error)))?;
        let json = self.read(response)?;
        let notes = json.get("notes").cloned().unwrap_or_default();
        Ok(Vec::deserialize(notes).unwrap_or_default())
    }

    fn ask<T: DeserializeOwned>(
        &self,
        path: &str,
        parameters: &[(&str, String)],
    ) -> Result<Fetched<T>, ClientError> {
        let fail = |why: String| ClientError { admin: self.admin, why, is_wrong: false };
        let mut request = self.agent.get(format!("http://{}{path}", self.admin));
        for (name, value) in parameters {
            request = request.query(name, value);
        }
        let response = request.call().map_err(|error| fail(no_answer(&error)))?;
        let json = self.read(response)?;
        let value = T::deserialize(&json)
            .map_err(|error| fail(format!("its answer cannot be understood: {error}")))?;
        Ok(Fetched { value, json })
    }

    /// The JSON of an answer, if it is one of ours and no refusal.
    fn read(&self, mut response: Response<Body>) -> Result<Value, ClientError> {
        let fail = |why: String| ClientError { admin: self.admin, why, is_wrong: false };
        let status = response.status();
        let json: Value = response
            .body_mut()
            .with_config()
            .limit(ANSWER_MAX)
            .read_json()
            .map_err(|_| fail(format!("status {status}, and no JSON: is this a smcgate?")))?;
        if !status.is_success() {
            let why = json.get("error").and_then(Value::as_str).unwrap_or("no reason given");
            let is_wrong = status == StatusCode::UNPROCESSABLE_ENTITY;
            return Err(ClientError { is_wrong, ..fail(format!("status {status}: {why}")) });
        }
        let Schema { schema } = Schema::deserialize(&json)
            .map_err(|_| fail("its answer has no schema: is this a smcgate?".to_owned()))?;
        if schema != SCHEMA {
            let why =
                format!("its answer has schema {schema}, but this program knows only {SCHEMA}");
            return Err(fail(why));
        }
        Ok(json)
    }
}

/// An answer as we understand it, and as it was given.
#[derive(Debug)]
pub struct Fetched<T> {
    /// What we understand.
    pub value: T,
    /// Everything.
    pub json: Value,
}

#[derive(Deserialize)]
struct Schema {
    schema: u32,
}

fn no_answer(error: &ureq::Error) -> String {
    if let ureq::Error::Io(error) = error
        && error.kind() == std::io::ErrorKind::ConnectionRefused
    {
        return "nobody listens there; is the gateway running, and is this its [admin] listen?"
            .to_owned();
    }
    error.to_string()
}

#[cfg(test)]
mod tests;
