//! Workers that show a certificate, and the certificate that they are shown.

use headrace_router::core::frame::*;

use super::handshake::tls_files;
use crate::fake_worker::*;

/// A router that other machines could reach, and that asks workers for a certificate.
async fn start_with_ca(secret: Option<&str>) -> std::sync::Arc<headrace_router::app::App> {
    let (cert, key) = tls_files();
    start_router(|args| {
        args.worker_listen = "0.0.0.0:0".into();
        args.worker_tls_cert = Some(cert);
        args.worker_tls_key = Some(key);
        args.worker_tls_client_ca = Some(data("tls/ca.crt"));
        args.secret = secret.map(str::to_owned);
    })
    .await
}

fn on_loopback(app: &headrace_router::app::App) -> headrace_router::config::WorkerListen {
    let address = app.fleet.address().to_string().replace("0.0.0.0", "127.0.0.1");
    headrace_router::config::WorkerListen::Tcp(address)
}

#[tokio::test]
async fn a_worker_with_a_certificate_needs_no_secret_and_one_without_does_not_get_to_say_hello() {
    let app = start_with_ca(None).await;
    let address = on_loopback(&app);
    let errors = || metric(&app, "headrace_link_errors_total", "handshake_tls");
    for (identity, before) in
        [(None, 0.0), (Some("other_client"), 1.0), (Some("expired_client"), 2.0)]
    {
        let (mut reader, mut writer) = dial_tls(&address, identity).await;
        send(&mut writer, Frame::Hello(hello("w1"))).await;
        assert_eq!(receive(&mut reader).await, None, "{identity:?}");
        until("it was refused", || errors() > before).await;
    }
    let (mut reader, mut writer) = dial_tls(&address, Some("client")).await;
    send(&mut writer, Frame::Hello(hello("w1"))).await;
    assert!(matches!(receive(&mut reader).await, Some(Frame::Welcome(_))));
    until("it joined", || state_of(&app, "w1") == "joining").await;
}

#[tokio::test]
async fn where_there_is_a_secret_too_a_certificate_alone_is_not_enough() {
    let app = start_with_ca(Some("long enough")).await;
    let (mut reader, mut writer) = dial_tls(&on_loopback(&app), Some("client")).await;
    send(&mut writer, Frame::Hello(hello("w1"))).await;
    let Some(Frame::Welcome(welcome)) = receive(&mut reader).await else { panic!("no challenge") };
    assert!(!welcome.challenge.is_empty() && welcome.hash_key.is_empty(), "{welcome:?}");
    send(&mut writer, Frame::Hello(hello("w1"))).await; // in the place of a proof
    while receive(&mut reader).await.is_some() {}
    assert_eq!(app.fleet.workers()["workers"], serde_json::json!([]));
}

#[tokio::test]
async fn the_certificate_of_the_links_is_read_again() {
    let (cert, key) = tls_files();
    let folder = std::env::temp_dir().join(format!("headrace-worker-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (used_cert, used_key) = (folder.join("tls.crt"), folder.join("tls.key"));
    let copy = |cert: &std::path::Path, key: &std::path::Path| {
        std::fs::copy(cert, &used_cert).unwrap();
        std::fs::copy(key, &used_key).unwrap();
    };
    copy(&cert, &key);
    let args = headrace_router::config::RouterArgs {
        port: 0,
        worker_listen: "127.0.0.1:0".into(),
        worker_tls_cert: Some(used_cert.clone()),
        worker_tls_key: Some(used_key.clone()),
        ..Default::default()
    };
    let server = headrace_router::server::Server::start(args.try_into().unwrap()).await.unwrap();
    let (app, reload) = (std::sync::Arc::clone(server.app()), server.reload());
    let (stopper, serving) = (server.stopper(), tokio::spawn(server.serve()));
    let loaded =
        || metric(&app, "headrace_reloads_total", "files=\"worker_tls\",outcome=\"loaded\"");
    copy(&data("tls/renewed.crt"), &data("tls/renewed.key"));
    reload.ask();
    until("it was loaded", || loaded() > 0.0).await;
    // only who signed the new one is trusted
    let (mut reader, mut writer) = dial_trusting(app.fleet.address(), "tls/ca.crt").await;
    send(&mut writer, Frame::Hello(hello("w1"))).await;
    assert!(matches!(receive(&mut reader).await, Some(Frame::Welcome(_))));
    stopper.stop();
    serving.await.unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}
