//! One document a second for all who watch, made once for all of them; none is made while nobody watches.
//!
//! A viewer that takes its documents too slowly misses some: it gets the latest one when it comes back. So a slow viewer holds
//! one document, and nobody up.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

/// Between two documents.
const PERIOD: Duration = Duration::from_secs(1);
/// Who may watch at once. A guess: a few operators with a few screens each.
pub(crate) const MOST_VIEWERS: usize = 16;

/// Where documents come from while somebody watches.
#[derive(Debug, Default)]
pub(crate) struct Feed(Arc<Mutex<Shown>>);

#[derive(Debug, Default)]
struct Shown {
    viewers: usize,
    /// Empty before the first document. `None` while nobody watches.
    latest: Option<watch::Sender<Bytes>>,
}

/// Somebody who watches, until this drops.
#[derive(Debug)]
pub(crate) struct Viewer {
    shown: Arc<Mutex<Shown>>,
    latest: watch::Receiver<Bytes>,
}

impl Feed {
    /// Watches from now on; `None` where [`MOST_VIEWERS`] do. `make` makes the documents if nobody watches yet, and ends the
    /// feed by making none.
    pub(crate) fn watch(
        &self,
        make: impl FnMut() -> Option<Bytes> + Send + 'static,
    ) -> Option<Viewer> {
        let mut shown = held(&self.0);
        if shown.viewers >= MOST_VIEWERS {
            return None;
        }
        let (mut latest, begins) = match &shown.latest {
            Some(sender) => (sender.subscribe(), false),
            None => {
                let (sender, receiver) = watch::channel(Bytes::new());
                shown.latest = Some(sender);
                (receiver, true)
            }
        };
        let watched = shown.viewers > 0;
        shown.viewers += 1;
        drop(shown);
        if begins {
            tokio::spawn(make_all(Arc::clone(&self.0), make));
        } else if watched && !latest.borrow().is_empty() {
            latest.mark_changed(); // it has not seen what the others have; what nobody sees may be old
        }
        Some(Viewer { shown: Arc::clone(&self.0), latest })
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        held(&self.0).latest.is_none()
    }
}

impl Viewer {
    /// The next document, or the latest one where several came meanwhile; `None` at the end of the feed.
    ///
    /// # Cancel safety
    /// A dropped call loses nothing.
    pub(crate) async fn next(&mut self) -> Option<Bytes> {
        self.latest.changed().await.ok()?;
        Some(self.latest.borrow_and_update().clone())
    }
}

impl Drop for Viewer {
    fn drop(&mut self) {
        held(&self.shown).viewers -= 1;
    }
}

async fn make_all(shown: Arc<Mutex<Shown>>, mut make: impl FnMut() -> Option<Bytes>) {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if held(&shown).end_unwatched() {
            return;
        }
        let document = make();
        let mut shown = held(&shown);
        let Some((document, latest)) = document.zip(shown.latest.as_ref()) else {
            shown.latest = None; // who watches is told that there is no more
            return;
        };
        latest.send_replace(document);
    }
}

impl Shown {
    /// Ends the feed if nobody watches. Whoever comes later begins another one.
    fn end_unwatched(&mut self) -> bool {
        if self.viewers == 0 {
            self.latest = None;
        }
        self.latest.is_none()
    }
}

fn held(shown: &Mutex<Shown>) -> MutexGuard<'_, Shown> {
    shown.lock().unwrap_or_else(PoisonError::into_inner) // a document more or less
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use tokio::time::{Instant, sleep};

    use super::*;

    /// Numbers as documents, and how many were made.
    fn numbers() -> (Arc<AtomicUsize>, impl FnMut() -> Option<Bytes> + Send + 'static) {
        let made = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&made);
        (made, move || Some(Bytes::from(counted.fetch_add(1, Relaxed).to_string())))
    }

    fn text(document: Option<Bytes>) -> String {
        String::from_utf8(document.unwrap().to_vec()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn all_see_the_same_documents_which_are_made_once() {
        let (feed, (made, make)) = (Feed::default(), numbers());
        let mut one = feed.watch(make).unwrap();
        assert_eq!(text(one.next().await), "0", "at once");
        let mut other = feed.watch(|| panic!("there is somebody who makes them")).unwrap();
        assert_eq!(text(other.next().await), "0", "the latest, without a wait");
        let begin = Instant::now();
        assert_eq!((text(one.next().await), text(other.next().await)), ("1".into(), "1".into()));
        assert_eq!((begin.elapsed(), made.load(Relaxed)), (PERIOD, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_viewer_gets_the_latest_and_keeps_nobody_waiting() {
        let (feed, (_, make)) = (Feed::default(), numbers());
        let (mut slow, mut quick) = (feed.watch(make).unwrap(), feed.watch(|| None).unwrap());
        for number in 0..100 {
            assert_eq!(text(quick.next().await), number.to_string());
        }
        assert_eq!(text(slow.next().await), "99");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_made_for_nobody_and_who_comes_back_begins_anew() {
        let (feed, (made, make)) = (Feed::default(), numbers());
        let mut viewer = feed.watch(make).unwrap();
        viewer.next().await;
        drop(viewer);
        sleep(10 * PERIOD).await;
        assert!(feed.is_idle());
        assert_eq!(made.load(Relaxed), 1);
        let (_, make) = numbers();
        assert_eq!(text(feed.watch(make).unwrap().next().await), "0");
    }

    #[tokio::test(start_paused = true)]
    async fn so_many_may_watch_and_one_more_when_one_has_left() {
        let feed = Feed::default();
        let watch = || feed.watch(|| Some(Bytes::from_static(b"x")));
        let mut viewers: Vec<Viewer> = (0..MOST_VIEWERS).map(|_| watch().unwrap()).collect();
        assert!(watch().is_none());
        viewers.pop();
        assert!(watch().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_feed_that_ends_tells_so_and_who_then_comes_begins_another() {
        let feed = Feed::default();
        let mut left = 2;
        let mut viewer = feed
            .watch(move || {
                left -= 1;
                (left > 0).then(|| Bytes::from_static(b"last"))
            })
            .unwrap();
        assert_eq!(text(viewer.next().await), "last");
        assert_eq!(viewer.next().await, None);
        let (_, make) = numbers();
        let mut next = feed.watch(make).unwrap();
        drop(viewer);
        assert_eq!(text(next.next().await), "0");
    }
}
