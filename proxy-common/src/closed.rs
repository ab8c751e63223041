//! From numbers in shared memory to enums.
//!
//! A number there may be anything, because another version may have written it. So the shared types
//! are newtypes with constants. This macro is the one way from each of them to an enum that a
//! `match` has to exhaust. With a new constant here, the workspace does not compile until the
//! programs and the agent decide about it.

/// Declares the closed enum of a newtype over `u8`, and the conversion.
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
            /// Converts the number; None if no constant has it.
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
