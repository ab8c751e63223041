//! Conversions from numbers in shared memory to enums.
//!
//! Another version may have written any number, so shared types are newtypes with constants. This
//! macro is the only conversion to an enum for exhaustive `match`es: a new constant breaks the
//! build until the programs and the agent handle it.

/// Declares the enum of a newtype over `u8`, and the conversion.
macro_rules! closed {
    ($(#[$doc:meta])* $open:ident => $closed:ident { $($CONST:ident => $Variant:ident),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum $closed {
            $($Variant = $open::$CONST.0),+
        }

        impl $closed {
            pub const ALL: [Self; [$(stringify!($Variant)),+].len()] = [$(Self::$Variant),+];
        }

        impl $open {
            /// Returns the variant. `None` if no constant has the number.
            #[inline(always)]
            pub const fn known(self) -> Option<$closed> {
                $(
                    if self.0 == Self::$CONST.0 {
                        return Some($closed::$Variant);
                    }
                )+
                None
            }
        }
    };
}
pub(crate) use closed;
