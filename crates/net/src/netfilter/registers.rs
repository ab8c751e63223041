//! Tracks the registers of a rule, to find out which field a comparison reads after loads and
//! masks.

use std::iter;
use std::ops::Range;

use super::model::{Condition, Field, MarkChange};

/// The number of the first four-byte register. Sixteen-byte registers have the numbers 1 to 4, and
/// each overlaps four four-byte registers.
const FIRST_OF_FOUR_BYTES: u32 = 8;

/// The content of registers: the masked bits of a field, with some bits flipped.
#[derive(Clone, Debug)]
struct Loaded {
    field: Field,
    mask: Vec<u8>,
    flipped: Vec<u8>,
}

/// The known registers, with positions in units of four bytes.
#[derive(Debug, Default)]
pub(super) struct Registers(Vec<(Range<u32>, Loaded)>);

impl Registers {
    /// Discards all content, because an expression wrote registers that kpx does not track.
    pub(super) fn forget(&mut self) {
        self.0.clear();
    }

    pub(super) fn load(&mut self, to: u32, field: Field, len: usize) {
        self.write(
            to,
            Loaded {
                field,
                mask: vec![0xff; len],
                flipped: vec![0; len],
            },
        );
    }

    /// Masks a register's content and flips bits. Unknown content remains unknown.
    pub(super) fn mask(&mut self, [from, to]: [u32; 2], mask: &[u8], flip: &[u8]) {
        let known = self
            .read(from)
            .filter(|known| known.mask.len() == mask.len() && mask.len() == flip.len());
        let Some(known) = known.cloned() else {
            return self.forget();
        };
        let flipped = iter::zip(&known.flipped, mask).map(|(bits, mask)| bits & mask);
        self.write(
            to,
            Loaded {
                field: known.field,
                mask: iter::zip(&known.mask, mask)
                    .map(|(one, other)| one & other)
                    .collect(),
                flipped: iter::zip(flipped, flip)
                    .map(|(bits, flip)| bits ^ flip)
                    .collect(),
            },
        );
    }

    /// Returns the condition that a register equals `value`, or differs from it; `None` if the
    /// content is unknown.
    pub(super) fn compare(&self, from: u32, value: &[u8], equal: bool) -> Option<Condition> {
        let Loaded {
            field,
            mask,
            flipped,
        } = self.read(from)?;
        Some(Condition {
            field: *field,
            mask: mask.get(..value.len())?.to_vec(),
            value: iter::zip(value, flipped)
                .map(|(bits, flip)| bits ^ flip)
                .collect(),
            equal,
        })
    }

    /// Returns the change of the mark when a register is stored in it; `None` unless the register
    /// holds a masked and flipped mark.
    pub(super) fn mark(&self, from: u32) -> Option<MarkChange> {
        let Loaded { mask, flipped, .. } = self
            .read(from)
            .filter(|loaded| loaded.field == Field::Mark)?;
        let bits = |bytes: &[u8]| bytes.try_into().map(u32::from_ne_bytes).ok();
        Some(MarkChange {
            keep: bits(mask)?,
            flip: bits(flipped)?,
        })
    }

    fn read(&self, register: u32) -> Option<&Loaded> {
        let at = place(register)?;
        self.0
            .iter()
            .find(|(places, _)| places.start == at)
            .map(|(_, loaded)| loaded)
    }

    fn write(&mut self, register: u32, loaded: Loaded) {
        let places = place(register).zip(u32::try_from(loaded.mask.len().div_ceil(4)).ok());
        let Some((at, len)) = places else {
            return self.forget();
        };
        let places = at..at.saturating_add(len);
        self.0
            .retain(|(known, _)| known.end <= places.start || places.end <= known.start);
        self.0.push((places, loaded));
    }
}

/// Returns a register's position; `None` for the verdict register and unknown registers.
fn place(register: u32) -> Option<u32> {
    match register {
        1..=4 => Some((register - 1) * 4),
        FIRST_OF_FOUR_BYTES..=23 => Some(register - FIRST_OF_FOUR_BYTES),
        _ => None,
    }
}
