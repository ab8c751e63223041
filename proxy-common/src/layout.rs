//! The number of what outlives the agent: the pinned maps, their keys and their values.

/// Another number is another folder of pins, and another handle of the filters, which no other
/// version touches. It grows with any change of a pinned map's type, key, value or flags, and of
/// what the bytes of keys and values mean: `layout/v2.txt` and `layout/v2-maps.txt` are what it
/// stands for.
pub const LAYOUT: u32 = 2;

#[cfg(test)]
mod tests;
