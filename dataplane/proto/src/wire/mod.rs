//! The messages as they travel.
//!
//! Every codec keeps the same contract: the frame layer has checked type and length, so `decode`
//! takes an array and cannot run off its end; reserved bits are zero when sent and ignored when
//! received; `decode(encode(x)) == x`.

pub mod cdc;
pub mod clc;
pub mod llc;
