//! Enterprise IDs: names of communities whose members speak SMC-Rv2 with each other.

use core::fmt;

use crate::wire::few::Few;

/// Length of an EID in bytes, blanks at its end included.
const LEN: usize = 32;

/// The most EIDs that a Proposal carries.
pub const EIDS_MAX: usize = 8;

/// The most EIDs that an operator may configure, as on Linux.
pub const CONFIGURED_MAX: usize = 4;

/// The EIDs of one side, in order of preference.
pub type Eids = Few<Eid, EIDS_MAX>;

/// A user-defined enterprise ID (UEID): upper case, padded with blanks.
///
/// An EID of a peer is not checked: it only has to equal one of ours.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Eid(pub [u8; LEN]);

/// Why a name cannot be an EID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EidError {
    /// It is empty.
    Empty,
    /// It has more than 32 characters.
    TooLong,
    /// It begins with something else than a letter or a digit.
    FirstCharacter,
    /// It contains something else than ASCII letters, digits, periods and hyphens.
    Character,
    /// More than four were configured.
    TooMany,
}

impl Eid {
    /// The default EID: every gateway has it, so that two of them need no configuration.
    pub const SMCGATE: Self = Self(*b"SMCGATE                         ");

    /// The EID with this name, in either case.
    ///
    /// # Errors
    ///
    /// [`EidError`] if Linux would not take the name either.
    pub fn new(name: &str) -> Result<Self, EidError> {
        let name = name.as_bytes();
        let first = name.first().ok_or(EidError::Empty)?;
        if name.len() > LEN {
            return Err(EidError::TooLong);
        }
        if !name.iter().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(byte)) {
            return Err(EidError::Character);
        }
        if !first.is_ascii_alphanumeric() {
            return Err(EidError::FirstCharacter);
        }
        let mut eid = [b' '; LEN];
        eid[..name.len()].copy_from_slice(name);
        eid.make_ascii_uppercase();
        Ok(Self(eid))
    }

    /// What a gateway offers and accepts: `configured`, then [`Eid::SMCGATE`].
    ///
    /// # Errors
    ///
    /// [`EidError::TooMany`] if there are more than [`CONFIGURED_MAX`].
    pub fn with_ours(configured: &[Self]) -> Result<Eids, EidError> {
        if configured.len() > CONFIGURED_MAX {
            return Err(EidError::TooMany);
        }
        let ours = (!configured.contains(&Self::SMCGATE)).then_some(Self::SMCGATE);
        Eids::from_items(configured.iter().copied().chain(ours)).ok_or(EidError::TooMany)
    }

    /// What a gateway offers and accepts if its operator leaves the default out: `configured`,
    /// which may contain [`Eid::SMCGATE`].
    ///
    /// # Errors
    ///
    /// [`EidError::TooMany`] if there are more than [`CONFIGURED_MAX`].
    pub fn without_ours(configured: &[Self]) -> Result<Eids, EidError> {
        if configured.len() > CONFIGURED_MAX {
            return Err(EidError::TooMany);
        }
        Eids::from_items(configured.iter().copied()).ok_or(EidError::TooMany)
    }
}

/// An EID that no host has.
impl Default for Eid {
    fn default() -> Self {
        Self([b' '; LEN])
    }
}

/// Without the blanks at its end; what is not printable, escaped.
impl fmt::Display for Eid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.trim_ascii_end().escape_ascii().fmt(f)
    }
}

impl fmt::Debug for Eid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Eid({self})")
    }
}

#[cfg(test)]
mod tests {
    use std::format;

    use super::*;

    /// An operator writes names as on Linux, and peers with the same name find each other.
    #[test]
    fn names_become_what_linux_makes_of_them() {
        let eid = Eid::new("test.eid-1").unwrap();
        assert_eq!(&eid.0, b"TEST.EID-1                      ");
        assert_eq!(format!("{eid} {eid:?}"), "TEST.EID-1 Eid(TEST.EID-1)");
        assert_eq!(Eid::new("smcgate"), Ok(Eid::SMCGATE));
        assert_eq!(format!("{}", Eid::default()), "");
        assert_eq!(format!("{}", Eid([0xc1; 32])).len(), 4 * 32, "EBCDIC is escaped");
    }

    /// A name that Linux refuses would never match; the operator must hear of it at the start.
    #[test]
    fn names_that_linux_refuses_are_refused() {
        assert_eq!(Eid::new(""), Err(EidError::Empty));
        assert_eq!(Eid::new(&"x".repeat(33)), Err(EidError::TooLong));
        assert!(Eid::new(&"x".repeat(32)).is_ok());
        assert_eq!(Eid::new(".x"), Err(EidError::FirstCharacter));
        assert_eq!(Eid::new("a b"), Err(EidError::Character));
        assert_eq!(Eid::new("b\u{e4}r"), Err(EidError::Character));
    }

    /// Two gateways speak SMC-Rv2 without configuration, and with whatever each has configured.
    #[test]
    fn ours_is_always_among_them() {
        let [a, b] = ["A", "B"].map(|name| Eid::new(name).unwrap());
        assert_eq!(Eid::with_ours(&[]).unwrap().as_slice(), [Eid::SMCGATE]);
        assert_eq!(Eid::with_ours(&[b, a]).unwrap().as_slice(), [b, a, Eid::SMCGATE]);
        let once = [Eid::SMCGATE, a];
        assert_eq!(Eid::with_ours(&once).unwrap().as_slice(), once);
        assert_eq!(Eid::with_ours(&[a; 5]), Err(EidError::TooMany));
        assert_eq!(Eid::without_ours(&[b, a]).unwrap().as_slice(), [b, a]);
        assert_eq!(Eid::without_ours(&[]).unwrap().as_slice(), []);
        assert_eq!(Eid::without_ours(&[a; 5]), Err(EidError::TooMany));
    }
}
