//! The keys and values of every map: the ABI between the kernel programs and the agent.
//!
//! Three rules hold for every type. Addresses and ports are newtypes in network byte order, so that
//! a comparison never mixes byte orders. Every byte is named, because the kernel hashes and
//! compares all bytes of a key; padding is a private field that constructors set to 0. Any bit
//! pattern is a valid value (no `bool`, `enum` or `Option`), because another version may have
//! written it.
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
pub mod foreign_nat;
pub mod fragment;
pub mod frontend;
pub mod half_open;
pub mod hook;
pub mod layout;
pub mod maps;
pub mod monitor;
pub mod names;
pub mod peer;
pub mod policy;
pub mod service_counts;
pub mod share;
pub mod socket;
pub mod ways;

#[cfg(feature = "user")]
pub mod pod;

/// Fails to compile unless the type has the sum of its fields' sizes, and so no implicit padding.
macro_rules! assert_size {
    ($type:ty = $size:expr) => {
        const _: () = assert!(core::mem::size_of::<$type>() == $size);
    };
}
pub(crate) use assert_size;
