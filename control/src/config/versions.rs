//! `eids` and `versions` of `[smc]`: which SMC-R is spoken, and with whom.

use smcr_proto::wire::clc::v2::{CONFIGURED_MAX, Eid, EidError, Eids};

use super::error::ConfigError;
use super::section::{Section, Source};
use super::{RnicConfig, RnicKind};

/// Which versions of SMC-R are spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Versions {
    /// Nobody said: SMC-Rv2, and SMC-Rv1 on RNICs with RoCE v1. Linux accepts an offer of SMC-Rv1
    /// that it cannot keep elsewhere, and takes seconds to find out.
    #[default]
    Fitting,
    /// These, on every RNIC.
    Listed {
        /// SMC-Rv1 (RFC 7609).
        v1: bool,
        /// SMC-Rv2.
        v2: bool,
    },
}

impl Versions {
    /// Whether SMC-Rv1 is spoken on an RNIC of this kind.
    pub const fn speaks_v1(self, kind: &RnicKind) -> bool {
        match self {
            Self::Fitting => kind.carries_roce_v1(),
            Self::Listed { v1, .. } => v1,
        }
    }

    /// Whether SMC-Rv2 is spoken.
    pub const fn speaks_v2(self) -> bool {
        match self {
            Self::Fitting => true,
            Self::Listed { v2, .. } => v2,
        }
    }
}

/// An RNIC that cannot carry what is spoken on it: SMC-Rv2 needs RoCE v2.
pub(super) fn in_conflict(versions: Versions, rnics: &[RnicConfig]) -> Option<&RnicConfig> {
    let is_v1 = |rnic: &&RnicConfig| rnic.kind.carries_roce_v1();
    // Where nobody said and all RNICs have RoCE v1, SMC-Rv2 is not spoken.
    let fits = versions == Versions::Fitting && rnics.iter().all(|rnic| is_v1(&rnic));
    rnics.iter().find(is_v1).filter(|_| versions.speaks_v2() && !fits)
}

/// Reads both keys.
pub(super) fn read(
    source: Source<'_>,
    table: &mut Section<'_>,
) -> Result<(Eids, Versions), ConfigError> {
    let mut eids = Vec::new();
    let mut last = None;
    for text in table.texts("eids")? {
        let eid =
            Eid::new(&text.value).map_err(|why| text.error(source, explain(why, &text.value)))?;
        if eids.contains(&eid) {
            return Err(text.error(source, format!("\"{eid}\" is listed twice")));
        }
        eids.push(eid);
        last = Some(text);
    }
    let default_eid = table.boolean("default_eid", true)?;
    let all = if default_eid { Eid::with_ours(&eids) } else { Eid::without_ours(&eids) };
    let eids = match (all, last) {
        (Ok(eids), _) => eids,
        (Err(why), Some(last)) => return Err(last.error(source, explain(why, &last.value))),
        (Err(_), None) => unreachable!("nothing listed is not too much"),
    };
    let (mut v1, mut v2) = (false, false);
    for number in table.numbers("versions", &(1..3))? {
        let listed = if number.value == 1 { &mut v1 } else { &mut v2 };
        if std::mem::replace(listed, true) {
            return Err(number.error(source, format!("{} is listed twice", number.value)));
        }
    }
    let versions = if v1 || v2 { Versions::Listed { v1, v2 } } else { Versions::Fitting };
    if eids.as_slice().is_empty() && versions.speaks_v2() {
        let why = "SMC-Rv2 needs a community: list one in smc.eids, or write versions = [1]";
        return Err(table.error("default_eid", why));
    }
    Ok((eids, versions))
}

fn explain(why: EidError, name: &str) -> String {
    match why {
        EidError::Empty => "an EID is empty; write a name such as \"FLEET-1\"".to_owned(),
        EidError::TooLong => format!("\"{name}\" has more than 32 characters"),
        EidError::FirstCharacter => {
            format!("\"{name}\" begins with neither a letter nor a digit")
        }
        EidError::Character => {
            format!("\"{name}\" may have letters, digits, \".\" and \"-\" only")
        }
        EidError::TooMany => format!("\"{name}\" is one too many; at most {CONFIGURED_MAX} fit"),
    }
}
