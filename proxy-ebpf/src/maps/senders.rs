//! The senders that source validation has accepted in this term, so that packets between two
//! addresses need one validation.

use aya_ebpf::macros::map;
use aya_ebpf::maps::PerCpuArray;

use super::live::part;
use super::{Find, Live, Maps};
use proxy_macros::global_fn;

/// The binary logarithm of the number of rows per CPU. Two pairs of addresses with the same row
/// replace each other.
const SENDERS_BITS: u32 = 9;

/// A validated source of packets to a destination.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sender {
    /// The addresses of the packets, in words.
    src: [u32; 4],
    dst: [u32; 4],
    /// The device and the term. The device's interface index is 0 while the row is empty.
    moment: u64,
    /// The kernel's number of the address family.
    family: u32,
    pad: u32,
}

#[map]
static SENDERS: PerCpuArray<Sender> = PerCpuArray::with_max_entries(1 << SENDERS_BITS, 0);

/// The interface index of a device in the upper half, and the term in the lower half: the sum of
/// the seconds since boot and the epoch's number. Both only grow.
#[derive(Clone, Copy)]
pub struct Moment(pub u64);

impl Moment {
    #[inline(always)]
    pub fn new(ifindex: u32, term: u32) -> Self {
        Self(u64::from(ifindex) << 32 | u64::from(term))
    }
}

/// Returns true if the sender was kept for this device and term.
#[global_fn(kpx_is_sender4, kpx_is_sender6)]
pub fn is_sender<A: Maps>(src: &A, dst: &A, moment: Moment) -> bool {
    let Moment(moment) = moment;
    let Some(row) = row(src, dst) else {
        return false;
    };
    let src = src.words();
    let dst = dst.words();
    // In bits, because each branch would multiply the verifier's work.
    let differences = row.read(|kept| {
        let of_place = kept.moment ^ moment | u64::from(kept.family ^ u32::from(A::AF));
        words::<A>().fold(of_place, |all, word| {
            all | u64::from(kept.src[word] ^ src[word] | kept.dst[word] ^ dst[word])
        })
    });
    differences == 0
}

/// Stores a sender for this device until the term ends.
#[global_fn(kpx_keep_sender4, kpx_keep_sender6)]
pub fn keep_sender<A: Maps>(src: &A, dst: &A, moment: Moment) {
    let Moment(moment) = moment;
    let Some(row) = row(src, dst) else { return };
    part!(row.src).set(src.words());
    part!(row.dst).set(dst.words());
    part!(row.moment).set(moment);
    part!(row.family).set(A::AF.into());
}

/// Returns the indexes of the words that an address of this family has.
#[inline(always)]
fn words<A: Maps>() -> core::ops::Range<usize> {
    0..size_of::<A>() / size_of::<u32>()
}

#[inline(always)]
fn row<A: Maps>(src: &A, dst: &A) -> Option<Live<Sender>> {
    // 2^32 divided by the golden ratio, which spreads neighbouring addresses.
    const MULTIPLIER: u32 = 0x9e37_79b9;
    let src = src.words();
    let dst = dst.words();
    let add = |sum: u32, word: u32| (sum ^ word).wrapping_mul(MULTIPLIER);
    let sum = words::<A>().fold(0, |sum, word| add(add(sum, src[word]), dst[word]));
    SENDERS.find_here(&(sum >> (u32::BITS - SENDERS_BITS)))
}
