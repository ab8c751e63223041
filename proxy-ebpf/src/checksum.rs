//! The arithmetic of checksums (RFC 1071, RFC 1624).

use core::ptr::{from_ref, null_mut};

use aya_ebpf::helpers::generated::bpf_csum_diff;

/// Returns the one's complement sum (RFC 1071) of a value, added to `seed`. The size is a multiple
/// of four.
#[inline(always)]
pub fn sum<T: Copy>(value: &T, seed: u32) -> u32 {
    replaced(None, value, seed)
}

/// Returns the change of a sum if `to` replaces `from`. The size is a multiple of four.
#[inline(always)]
pub fn diff<T: Copy>(from: &T, to: &T) -> u32 {
    replaced(Some(from), to, 0)
}

#[inline(always)]
fn replaced<T: Copy>(from: Option<&T>, to: &T, seed: u32) -> u32 {
    let size = size_of::<T>() as u32;
    let (from, from_size) = from.map_or((null_mut(), 0), |from| {
        (from_ref(from).cast_mut().cast(), size)
    });
    // SAFETY: the helper reads as many bytes as the values have, and writes none.
    unsafe { bpf_csum_diff(from, from_size, from_ref(to).cast_mut().cast(), size, seed) as u32 }
}

/// The result of [`diff_words`] for equal words: the negative zero of one's complement.
pub const NO_DIFF: u32 = u32::MAX;

/// Computes the same as [`diff`], word by word and without a helper.
#[inline(always)]
pub fn diff_words(from: &[u32], to: &[u32]) -> u32 {
    let sum: u64 = from
        .iter()
        .zip(to)
        .map(|(from, to)| u64::from(!from) + u64::from(*to))
        .sum();
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    (sum + (sum >> 32)) as u32
}

/// Returns true if a transport checksum that the kernel has updated by `diff` was a seed, which the
/// device completes (CHECKSUM_PARTIAL). The kernel adds `diff` to a seed, and subtracts it from a
/// complete checksum. Returns false if the result is ambiguous.
#[inline(always)]
pub fn is_seed(before: u32, after: u32, diff: u32) -> bool {
    let diff = fold(diff);
    // Both zeros of one's complement leave the checksum unchanged, so the result is ambiguous.
    let tells = diff != 0 && diff != 0xffff && before < UNREAD;
    tells && u32::from(fold(before + u32::from(diff))) == after
}

/// Stands for a checksum that cannot be read in place. (Linux 5.10 requires that a value kept
/// across a call is initialised.)
pub const UNREAD: u32 = 1 << 16;

/// Folds a sum to the 16 bits of a checksum field, not yet inverted.
#[inline(always)]
pub fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum + (sum >> 16)) as u16
}
