//! One polling thread.
