//! The version of the state that outlives the agent: the pinned maps, their keys and values.

/// The layout version. Each version has its own directory of pins and handle of filters, and leaves
/// those of other versions alone. The version increases with any change of a pinned map's type,
/// key, value, flags or the meaning of their bytes, as recorded in `layout/v2.txt` and
/// `layout/v2-maps.txt`.
pub const LAYOUT: u32 = 2;

#[cfg(test)]
mod tests;
