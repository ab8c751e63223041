//! The number of a namespace, which divides the flow table among namespaces.

/// The number of a namespace: 24 bits in host byte order.
///
/// The agent assigns numbers, which are unique in a cluster at any time. A restart may assign other
/// numbers.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace([u8; 3]);

impl Namespace {
    /// No namespace. Only the clients' shares limit such flows.
    pub const NONE: Self = Self([0; 3]);

    /// Takes the lower 24 bits.
    #[inline(always)]
    pub const fn new(number: u32) -> Self {
        let [a, b, c, _] = number.to_le_bytes();
        Self([a, b, c])
    }

    #[inline(always)]
    pub const fn number(self) -> u32 {
        let [a, b, c] = self.0;
        u32::from_le_bytes([a, b, c, 0])
    }

    #[inline(always)]
    pub const fn is_none(self) -> bool {
        self.number() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_keeps_24_bits() {
        for number in [1, 0x0001_0203, 0x00ff_ffff] {
            assert_eq!(Namespace::new(number).number(), number);
        }
        assert!(
            Namespace::new(0x0100_0000).is_none()
                && Namespace::NONE.is_none()
                && !Namespace::new(1).is_none()
        );
    }
}
