//! What a gateway counts, from its `/stats`.

use crate::failure::{Doing as _, Failure, Result};

/// Totals of one gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GatewayTotals {
    pub(crate) connections_smc: u64,
    pub(crate) connections_tcp: u64,
    /// RoCE packets that its RNICs have received and sent.
    pub(crate) packets: u64,
}

/// Finds the totals in the JSON of `GET /stats`.
///
/// # Errors
///
/// Which one is missing.
pub(crate) fn parse_totals(json: &str) -> Result<GatewayTotals> {
    let stats = parse(json)?;
    let total = |name: &str| {
        let missing = || Failure::new(format!("GET /stats has no totals.{name}"));
        stats["totals"][name].as_u64().ok_or_else(missing)
    };
    let packets = |rnic: &serde_json::Value| {
        Some(rnic["packets_in"].as_u64()? + rnic["packets_out"].as_u64()?)
    };
    let rnics = stats["rnics"].as_array();
    let packets = rnics.and_then(|rnics| rnics.iter().map(packets).sum::<Option<u64>>());
    Ok(GatewayTotals {
        connections_smc: total("connections_smc")?,
        connections_tcp: total("connections_tcp")?,
        packets: packets.ok_or_else(|| Failure::new("GET /stats counts no packets of RNICs"))?,
    })
}

/// How many connections there are now, by the same JSON.
///
/// # Errors
///
/// Which figure is missing.
pub(crate) fn parse_active(json: &str) -> Result<u64> {
    let stats = parse(json)?;
    let active = |transport: &str| {
        let missing = || Failure::new(format!("GET /stats has no active.{transport}"));
        stats["active"][transport].as_u64().ok_or_else(missing)
    };
    Ok(active("smc")? + active("tcp")?)
}

/// What has happened since the gateway started, by the same JSON: why connections stayed TCP, and
/// whatever is counted.
///
/// # Errors
///
/// When it does not say.
pub(crate) fn parse_events(json: &str) -> Result<String> {
    let stats = parse(json)?;
    let fallbacks = stats["fallbacks"].as_array();
    let fallbacks = fallbacks.ok_or_else(|| Failure::new("GET /stats has no fallbacks"))?;
    let fallbacks = fallbacks.iter().map(|one| match (&one["count"], &one["name"]) {
        (count, serde_json::Value::String(name)) if count.is_u64() => Ok(format!("{count} {name}")),
        _ => Err(Failure::new("GET /stats has a fallback without a count or a name")),
    });
    let totals = stats["totals"].as_object();
    let totals = totals.ok_or_else(|| Failure::new("GET /stats has no totals"))?;
    let totals = totals.iter().filter(|(_, count)| count.as_u64() != Some(0));
    let totals = totals.map(|(name, count)| Ok(format!("{count} {name}")));
    Ok(fallbacks.chain(totals).collect::<Result<Vec<_>>>()?.join(", "))
}

/// The JSON, if a gateway that runs has written it: one that cannot answer has zeros everywhere.
fn parse(json: &str) -> Result<serde_json::Value> {
    let stats: serde_json::Value = serde_json::from_str(json).doing(|| "GET /stats".into())?;
    match stats["schema"].as_u64() {
        Some(SCHEMA) => Ok(stats),
        Some(_) | None => {
            Err(Failure::new(format!("GET /stats has schema {}, not {SCHEMA}", stats["schema"])))
        }
    }
}

/// The version of the answer that is read here.
const SCHEMA: u64 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// These numbers prove that a figure was SMC-R, so a renamed key must stop the run instead of
    /// reading as zero.
    #[test]
    fn a_missing_total_is_an_error() {
        let json = r#"{"schema":1,"totals":{"connections_smc":7,"connections_tcp":2,"x":1},
            "rnics":[{"packets_in":5,"packets_out":4},{"packets_in":1,"packets_out":0}]}"#;
        let expected = GatewayTotals { connections_smc: 7, connections_tcp: 2, packets: 10 };
        assert_eq!(parse_totals(json).unwrap(), expected);
        assert!(parse_totals(&json.replace("packets_out", "packets_sent")).is_err());
        let renamed = json.replace("connections_tcp", "tcp_connections");
        assert!(parse_totals(&renamed).unwrap_err().to_string().contains("connections_tcp"));
        assert!(parse_totals("<html>").is_err());
    }

    /// The zeros of a gateway that does not answer would be published as those of one that idles.
    #[test]
    fn an_answer_without_a_version_is_an_error() {
        let json = r#"{"schema":0,"totals":{"connections_smc":0,"connections_tcp":0},"rnics":[],
            "active":{"smc":0,"tcp":0},"fallbacks":[]}"#;
        for json in [json.to_owned(), json.replace("\"schema\":0,", "")] {
            assert!(parse_totals(&json).unwrap_err().to_string().contains("schema"));
            assert!(parse_active(&json).is_err() && parse_events(&json).is_err());
        }
        assert_eq!(parse_active(&json.replace("schema\":0", "schema\":1")).unwrap(), 0);
    }

    #[test]
    fn whoever_stayed_tcp_has_a_reason() {
        let json = r#"{"schema":1,"totals":{"refused_tcp":2,"rings":0},
            "fallbacks":[{"code":1,"name":"A","count":3},{"name":"B","count":1}]}"#;
        assert_eq!(parse_events(json).unwrap(), "3 A, 1 B, 2 refused_tcp");
        let renamed = ["name", "fallbacks", "totals"].map(|key| json.replace(key, "called"));
        for renamed in renamed.iter().map(String::as_str).chain(["<html>"]) {
            assert!(parse_events(renamed).is_err(), "{renamed}");
        }
    }

    /// A key that was renamed must not read as silence.
    #[test]
    fn a_missing_count_is_an_error() {
        let json = r#"{"schema":1,"active":{"smc":3,"tcp":1,"parked":0}}"#;
        assert_eq!(parse_active(json).unwrap(), 4);
        assert!(parse_active(&json.replace("tcp", "plain")).is_err());
    }
}
