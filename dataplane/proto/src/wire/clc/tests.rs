//! Codecs against bytes of other stacks.
