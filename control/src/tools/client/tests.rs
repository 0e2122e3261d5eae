//! The client against the real endpoint, and against what is none.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;

use super::*;
use crate::admin;
use crate::config::Config;
use crate::operate::OperateError;
use crate::stats::{
    Answering, Provider, Readiness, Sample, Transport,
    tests::{answered as ready_made, page_of, row},
};

/// A gateway with many connections.
struct Busy {
    connections: u64,
}

impl Provider for Busy {
    fn stats(&self) -> Answering<Stats> {
        ready_made(Stats { schema: SCHEMA, uptime_s: 5, ..Stats::default() })
    }

    fn sample(&self) -> Answering<Sample> {
        ready_made(Sample::default())
    }

    fn figures(&self) -> Answering<Stats> {
        self.stats()
    }

    fn connections(&self, query: ConnectionQuery) -> Answering<ConnectionPage> {
        let all = (0..self.connections)
            .map(|id| row(id, "a & b", if id % 2 == 0 { Transport::SmcR } else { Transport::Tcp }));
        ready_made(page_of(all, &query))
    }

    fn config(&self) -> Answering<Config> {
        panic!("no program asks for it")
    }

    fn ready(&self, _: Option<String>) -> Answering<Readiness> {
        ready_made(Readiness::default())
    }

    fn operate(&self, operation: Operation) -> Result<Vec<String>, OperateError> {
        let known = Operation::RnicUp { rnic: "r0".to_owned() };
        if operation == known {
            return Ok(vec!["it is up".to_owned()]);
        }
        if operation == Operation::Reload {
            return Err(OperateError::Wrong("a.toml:3: nonsense".to_owned()));
        }
        Err(OperateError::Unknown(format!("{operation:?}")))
    }
}

/// More connections than fit one page are all listed, and a listener's name may be anything.
#[test]
fn lists_all_connections_across_pages() {
    let provider = Arc::new(Busy { connections: 4_100 });
    let admin = admin::spawn("127.0.0.1:0".parse().unwrap(), provider).unwrap();
    let client = Client::new(admin.address());
    assert_eq!(client.stats().unwrap().value.uptime_s, 5);

    let query = ConnectionQuery {
        listener: Some("a & b".to_owned()),
        transport: Some(Transport::Tcp),
        ..ConnectionQuery::default()
    };
    let all = client.all_connections(&query).unwrap();
    assert_eq!((all.total, all.connections.len()), (2_050, 2_050));
    let page = client.connections(&ConnectionQuery { page: 21, ..query }).unwrap().value;
    assert_eq!((page.total, page.connections.len()), (2_050, 50));
}

/// A command is obeyed, or the operator reads why not.
#[test]
fn a_command_begins_or_says_why_not() {
    let provider = Arc::new(Busy { connections: 0 });
    let admin = admin::spawn("127.0.0.1:0".parse().unwrap(), provider).unwrap();
    let client = Client::new(admin.address());
    let notes = client.operate(&Operation::RnicUp { rnic: "r0".to_owned() }).unwrap();
    assert_eq!(notes, ["it is up"]);
    let error = client.operate(&Operation::Reload).unwrap_err();
    assert!(error.is_wrong() && error.to_string().contains("a.toml:3: nonsense"), "{error}");
    let error = client.operate(&Operation::LinkAdd { group: 3 }).unwrap_err().to_string();
    assert!(error.contains("404") && error.contains("group: 3"), "{error}");
}

/// Serves one answer and returns what the client made of it.
fn answered(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 1024];
        assert_ne!(stream.read(&mut request).unwrap(), 0);
        stream.write_all(answer.as_bytes()).unwrap();
    });
    let error = Client::new(address).stats().unwrap_err().to_string();
    server.join().unwrap();
    assert!(!error.contains('\n') && error.contains(&address.to_string()), "{error}");
    error
}

/// Whoever asks the wrong port, or a gateway of another age, is told so in one line.
#[test]
fn says_what_is_wrong_with_an_answer() {
    let page = answered("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello");
    assert!(page.contains("is this a smcgate"), "{page}");
    let other = answered("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
    assert!(other.contains("no schema"), "{other}");
    let newer = answered("HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{\"schema\":2}");
    assert!(newer.contains("schema 2"), "{newer}");
    let broken = answered("HTTP/1.1 500 No\r\nContent-Length: 15\r\n\r\n{\"error\":\"out\"}");
    assert!(broken.contains("500") && broken.ends_with(": out"), "{broken}");
}

#[test]
fn says_when_nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = Client::new(address).stats().unwrap_err().to_string();
    assert!(error.contains("nobody listens"), "{error}");
}
