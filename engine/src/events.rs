//! Events and spans for the `tracing` crate.
//!
//! Without the feature `tracing` both macros expand to nothing, so an embedder who does not ask for them pays nothing.
//! With it, each fault that [`Health`](crate::store::Health) counts is an event, and each open, commit, read batch and
//! cleaning is a span. The target of all of them is `stratakv`.
//!
//! | level | events |
//! |---|---|
//! | `error` | a device takes no more writes, or was declared lost; the store is read-only until it is opened again |
//! | `warn` | a block or frame does not match its checksum, an operation of a device failed, an append found no space,
//! a commit waits for space, a segment cannot be emptied, metadata was damaged at open |
//! | `info` | a sequence was evicted or expired |
//! | `debug` | another copy gave what a read did not, a late read was repeated on another device |
//!
//! Spans: `open`, `commit`, `read`, `clean`, all at `debug`.

/// Sends an event: `event!(warn, device = 3, "a read failed")`. Values are [`std::fmt::Display`].
macro_rules! event {
    ($level:ident, $($field:ident = $value:expr,)* $text:literal) => {{
        #[cfg(feature = "tracing")]
        ::tracing::$level!(target: "stratakv", $($field = %$value,)* $text);
        #[cfg(not(feature = "tracing"))]
        {
            $(let _ = &$value;)*
        }
    }};
}

/// Enters a span until the returned guard is dropped: `let _span = span!("commit");`.
macro_rules! span {
    ($name:literal) => {{
        #[cfg(feature = "tracing")]
        let guard = ::tracing::debug_span!(target: "stratakv", $name).entered();
        #[cfg(not(feature = "tracing"))]
        let guard = $crate::events::NoSpan;
        guard
    }};
}
pub(crate) use {event, span};

/// The guard of a span without the feature `tracing`.
#[cfg(not(feature = "tracing"))]
pub(crate) struct NoSpan;
