//! Records sent data and times, to measure clients.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

#[derive(Debug, Default)]
pub struct Meter {
    bytes_sent: AtomicU64,
    last_list: Mutex<Option<Instant>>,
    events: Mutex<Option<mpsc::Sender<(u64, Instant)>>>,
}

impl Meter {
    /// Returns the bytes sent to all clients, including TLS.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes_sent.load(Ordering::Relaxed)
    }

    /// Returns the time of the last page of a list, or of a stream's last line.
    pub fn last_list(&self) -> Option<Instant> {
        *self
            .last_list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the version and time of each event from now on.
    pub fn events(&self) -> mpsc::Receiver<(u64, Instant)> {
        let (sender, receiver) = mpsc::channel();
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        receiver
    }

    pub fn forget_events(&self) {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(super) fn list_made(&self) {
        *self
            .last_list
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub(super) fn event_made(&self, version: u64) {
        if let Some(events) = &*self.events.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = events.send((version, Instant::now())); // The receiver may be gone.
        }
    }
}

/// A connection that counts its bytes.
pub(super) struct Metered {
    pub(super) stream: TcpStream,
    pub(super) meter: Arc<Meter>,
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Metered {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        if let Poll::Ready(Ok(len)) = written {
            self.meter
                .bytes_sent
                .fetch_add(len as u64, Ordering::Relaxed);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
