//! The keys and values of every map, on which the kernel programs and the agent must agree.
//!
//! Three rules hold for every type here.
//! Addresses and ports are in network byte order inside newtypes, so that an unswapped port cannot
//! be compared with a swapped one. Every byte is named, because the kernel hashes and compares all
//! of a key's bytes: padding is a private field that constructors zero. Any bit pattern is a valid
//! value (no `bool`, no `enum`, no `Option`), because the other side may be another version.
#![cfg_attr(not(any(test, feature = "user")), no_std)]

pub mod addr;
pub mod balance;
mod closed;
pub mod connect;
pub mod counter;
pub mod cpu;
pub mod crc32c;
pub mod device;
pub mod flow;
pub mod fragment;
pub mod frontend;
pub mod guest;
pub mod half_open;
pub mod hook;
pub mod layout;
pub mod maps;
pub mod monitor;
pub mod names;
pub mod policy;
pub mod service_counts;
pub mod share;
pub mod socket;
pub mod ways;

#[cfg(feature = "user")]
pub mod pod;

/// Fails to compile unless the fields' sizes add up to the type's size, so that no byte is left
/// unnamed.
macro_rules! assert_size {
    ($type:ty = $size:expr) => {
        const _: () = assert!(core::mem::size_of::<$type>() == $size);
    };
}
pub(crate) use assert_size;
