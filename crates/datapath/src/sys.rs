//! The system calls that no crate offers. All `unsafe` code of this crate is here.
#![allow(unsafe_code, reason = "each call hands pointers to the kernel")]

pub(crate) mod map_walk;
pub(crate) mod netns_cookie;
pub(crate) mod tcx_query;
