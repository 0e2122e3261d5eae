//! What suites share.
