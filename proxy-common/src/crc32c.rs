//! Incremental updates of SCTP's checksum (RFC 9260 appendix A), without reading the packet.
//!
//! A CRC is a linear function of the message as a polynomial. So the CRC of a changed message
//! differs by the CRC of the difference, which is zero except for the changed bytes.

/// The polynomial. Here the lowest power is always in the highest bit.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// The values that two bits leave in the register when they are shifted out.
static LEFT: [u32; 4] = [0, POLYNOMIAL >> 1, POLYNOMIAL, POLYNOMIAL >> 1 ^ POLYNOMIAL];

/// x^(8 * n): the effect of n zero bytes on the register.
static ZEROS: [u32; 256] = powers(1 << (31 - 8));
/// The effect of 256 * n zero bytes on the register.
static MANY_ZEROS: [u32; 256] = powers(multiply(ZEROS[255], ZEROS[1]));

/// Returns the CRC of a message of `len` bytes after an XOR of its first four bytes (little-endian)
/// with `diff`.
#[inline(always)]
pub fn updated(crc: u32, diff: u32, len: u16) -> u32 {
    crc ^ after_zeros(diff, len)
}

/// Returns the register after `len` zero bytes. (Four data bytes into an empty register equal four
/// zero bytes into a register with that data.)
#[inline(always)]
fn after_zeros(register: u32, len: u16) -> u32 {
    let [low, high] = len.to_le_bytes();
    multiply(
        multiply(register, ZEROS[usize::from(low)]),
        MANY_ZEROS[usize::from(high)],
    )
}

/// Multiplies modulo the polynomial, two powers of `b` at a time from the highest down.
///
/// The verifier follows both sides of a branch, and of an AND of a constant with an all-or-nothing
/// mask. So a table replaces the constant.
#[inline(always)]
const fn multiply(a: u32, b: u32) -> u32 {
    // a * x.
    let shifted = a >> 1 ^ LEFT[(a << 1 & 2) as usize];
    let mut product = 0;
    let mut shift = 0;
    // Two powers at a time: with four, LLVM unrolls eight rounds and spills them to the stack.
    while shift < u32::BITS {
        let bits = b >> shift;
        product = product >> 2
            ^ LEFT[(product & 3) as usize]
            ^ a & mask(bits >> 1)
            ^ shifted & mask(bits);
        shift += 2;
    }
    product
}

/// Returns a mask filled with the lowest bit.
#[inline(always)]
const fn mask(bits: u32) -> u32 {
    0u32.wrapping_sub(bits & 1)
}

const fn powers(base: u32) -> [u32; 256] {
    let one = 1 << 31;
    let mut powers = [one; 256];
    let mut n = 1;
    while n < powers.len() {
        powers[n] = multiply(powers[n - 1], base);
        n += 1;
    }
    powers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 9260's definition: bit by bit, from all ones, inverted.
    fn crc32c(message: &[u8]) -> u32 {
        let mut register = u32::MAX;
        for byte in message {
            register ^= u32::from(*byte);
            for _ in 0..8 {
                register = register >> 1 ^ if register & 1 == 1 { 0x82f6_3b78 } else { 0 };
            }
        }
        !register
    }

    #[test]
    fn the_reference_is_the_one_of_the_standard() {
        // The check value of CRC-32C, and RFC 3720 appendix B.4: 32 bytes of zeros.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn an_update_is_what_a_full_pass_finds_at_every_length() {
        let mut message: Vec<u8> = (0..=u16::MAX).map(|n| (n ^ n >> 7) as u8).collect();
        let diffs = [1, 0x8000_0000, 0x1234_5678, u32::MAX];
        // Every length up to a usual packet's, then steps coprime to powers of two.
        for len in (12..=1_600_u16)
            .chain((1_600..=u16::MAX).step_by(997))
            .chain([u16::MAX])
        {
            let diff = diffs[usize::from(len) % diffs.len()];
            let before = crc32c(&message[..usize::from(len)]);
            for (byte, change) in message.iter_mut().zip(diff.to_le_bytes()) {
                *byte ^= change;
            }
            assert_eq!(
                updated(before, diff, len),
                crc32c(&message[..usize::from(len)]),
                "{len} bytes"
            );
        }
    }

    #[test]
    fn no_change_changes_nothing() {
        assert_eq!(updated(0xdead_beef, 0, 1_500), 0xdead_beef);
    }
}
