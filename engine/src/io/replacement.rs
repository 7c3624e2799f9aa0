//! Replacements: parts of the system that a simulator can put in place of the real ones.
//!
//! A [`Replacement`] of a trait is a shared trait object if the feature `sim` is on. Without the feature no value of
//! the type exists, so the compiler removes every branch that handles one, and an `Option` of it takes no space.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

/// A part of the system that the simulator replaces. No value exists without the feature `sim`.
pub(crate) struct Replacement<T: ?Sized> {
    #[cfg(feature = "sim")]
    part: Arc<T>,
    #[cfg(not(feature = "sim"))]
    never: std::convert::Infallible,
    // The same auto traits with and without the feature.
    part_type: PhantomData<Arc<T>>,
}

#[cfg(feature = "sim")]
impl<T: ?Sized> From<Arc<T>> for Replacement<T> {
    fn from(part: Arc<T>) -> Self {
        Self { part, part_type: PhantomData }
    }
}

impl<T: ?Sized> Clone for Replacement<T> {
    fn clone(&self) -> Self {
        #[cfg(feature = "sim")]
        return Self { part: Arc::clone(&self.part), part_type: PhantomData };
        #[cfg(not(feature = "sim"))]
        match self.never {}
    }
}

impl<T: ?Sized> Deref for Replacement<T> {
    type Target = T;

    fn deref(&self) -> &T {
        #[cfg(feature = "sim")]
        return &self.part;
        #[cfg(not(feature = "sim"))]
        match self.never {}
    }
}
