//! Properties of the source itself.
